"""Figures that measurements are sums of, found from the measurements: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDS = 300
_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Sum:
    """One measurement."""

    parts: tuple[float, ...]
    """How often each figure is in it; all of a fit equally many."""
    seconds: float
    is_bound: bool = False
    """Whether it is only known to have taken no longer."""


def fitted(sums: Sequence[Sum], begin: Sequence[float]) -> tuple[float, ...]:
    """Figures of 0 or more for which ``sums`` come out, on the whole, as measured; those of ``begin`` where none says anything.

    Maximum likelihood of Poisson's distribution by its multiplicative steps (W. H. Richardson, 1972; L. B. Lucy, 1974): none
    gets below 0, and all together take as long as was measured, so that what the model does not know of is spread over all.
    A figure that begins at 0 stays there.
    """
    figures = list(begin)
    weight = [sum(one.parts[i] for one in sums) for i in range(len(figures))]
    for _ in range(_ROUNDS):
        gain = [0.0] * len(figures)
        for one in sums:
            predicted = sum(part * figure for part, figure in zip(one.parts, figures, strict=True))
            if predicted <= 0:
                continue
            ratio = one.seconds / predicted
            if one.is_bound:
                ratio = min(1.0, ratio)
            for i, part in enumerate(one.parts):
                if part:
                    gain[i] += part * ratio
        before = figures
        figures = [f * g / w if w else f for f, g, w in zip(figures, gain, weight, strict=True)]
        if all(abs(new - old) <= _CLOSE * old for new, old in zip(figures, before, strict=True)):
            break
    return tuple(figures)
