"""When warm-up is over and when there are samples enough. All ranks decide alike: from samples and a clock that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, median

WINDOW = 4
"""Rounds whose median is compared with that of as many before them."""
_SETTLED = 0.02
_STANDARD_ERRORS = 2
_MAD_TO_SIGMA = 1.4826
_MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)
"""How much wider a median scatters than a mean, of normal samples."""
_LEAST_ROUNDS = 8
_Z = NormalDist().inv_cdf(0.995)


@dataclass(frozen=True, slots=True)
class Pacing:
    """How long one set of processes goes on."""

    budget_s: float
    """For warm-up and samples together; a third of it at most for warm-up."""
    precision: float
    """Half width that is asked of the interval of each log ratio of two variants; 0: the whole budget is used."""
    least_rounds: int = _LEAST_ROUNDS
    """Even if they take longer."""


def has_settled(samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether no variant was faster in its last rounds than in those before, beyond noise: start-up costs only ever fall."""
    return all(len(rounds) >= 2 * WINDOW and not _falls(rounds[-2 * WINDOW :]) for rounds in samples.values())


def _falls(rounds: Sequence[float]) -> bool:
    """Whether the median of the second half lies below that of the first by more than both scatter."""
    first, last = rounds[:WINDOW], rounds[WINDOW:]
    scatter = median(abs(one - median(half)) for half in (first, last) for one in half)
    noise = _STANDARD_ERRORS * _MEDIAN_TO_MEAN * _MAD_TO_SIGMA * scatter * math.sqrt(2 / WINDOW)
    return median(first) - median(last) > max(_SETTLED * median(first), noise)


def is_warm(samples: Mapping[str, Sequence[float]], elapsed_s: float, pacing: Pacing) -> bool:
    """Whether warm-up ends, settled or because its share of the time is over."""
    rounds = len(next(iter(samples.values())))
    return has_settled(samples) or (elapsed_s >= pacing.budget_s / 3 and rounds >= 2 * WINDOW)


def is_enough(samples: Mapping[str, Sequence[float]], elapsed_s: float, pacing: Pacing) -> bool:
    """Whether sampling ends; ``elapsed_s`` counts from the start of warm-up."""
    if len(next(iter(samples.values()))) < pacing.least_rounds:
        return False
    return elapsed_s >= pacing.budget_s or half_width(samples) <= pacing.precision


def half_width(samples: Mapping[str, Sequence[float]]) -> float:
    """Of the 99 % interval of the median log ratio of two variants' paired rounds, the widest; 0 of a single variant.

    A normal approximation with the median absolute deviation as scale, good enough to decide when to stop.
    """
    widths = []
    for one, other in combinations(samples.values(), 2):
        ratios = [math.log(a / b) for a, b in zip(one, other, strict=True)]
        middle = median(ratios)
        sigma = _MAD_TO_SIGMA * median(abs(ratio - middle) for ratio in ratios)
        widths.append(_Z * _MEDIAN_TO_MEAN * sigma / math.sqrt(len(ratios)))
    return max(widths, default=0.0)
