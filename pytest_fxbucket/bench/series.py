"""Samples of step time, as they were taken: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Samples = tuple[tuple[float, ...], ...]
"""Of one variant: seconds of the slowest rank, one a round, for each set of processes in turn."""

LEAST_S, MOST_S = 1e-9, 1e6
"""Seconds that a step can take: a sample that is none of these was not measured."""


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of variants that took turns in the same processes: round r of all of them ran right after one another."""

    samples: Mapping[str, Samples]
    """By the variant's name: unbucketed, bucketed, or a pass. All have equally many rounds in each set of processes."""
    warmup_rounds: tuple[int, ...]
    """Rounds before the first sample, of each set of processes."""
    is_stable: bool
    """Whether step time settled before sampling began, in every set of processes."""
    has_priority: bool
    """Whether all ranks ran before everything else on the machine."""
    peak_bytes: Mapping[str, tuple[int, ...]]
    """By variant, largest resident size of each rank's process during a step of it; on a GPU memory of the rank's tensors."""

    def all_of(self, variant: str) -> list[float]:
        """Seconds of every round of ``variant``, in the order in which they ran."""
        return [sample for rounds in self.samples[variant] for sample in rounds]
