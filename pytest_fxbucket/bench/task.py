"""What ranks are to time, and what one of them brings back: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_fxbucket.stepping import Stepping

if TYPE_CHECKING:
    from pytest_fxbucket.bench.pace import Pacing
    from pytest_fxbucket.bench.timeline.marks import Mark
    from pytest_fxbucket.bench.timeline.span import Span
    from pytest_fxbucket.graph.portable import PortableGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTask(Stepping):
    """One graph of a step in all its variants; a step runs its phases one after another."""

    graphs: Mapping[str, PortableGraph]
    """By variant."""
    marks: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)
    """By variant, where the clock is read in a traced step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one rank is to do: steps of variants, which take turns."""

    variants: tuple[str, ...]
    phases: tuple[PhaseTask, ...]
    pacing: Pacing
    traced_steps: int = 0
    """Steps of each variant of which a timeline is taken, after all samples."""


@dataclass(slots=True)
class Timed:
    """What one rank brings back."""

    digests: dict[str, tuple[str, ...]]
    """Of the graphs that ran, by variant, one a phase."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of the slowest rank, one a round; the same on every rank."""
    warmup_rounds: int = 0
    is_stable: bool = False
    has_priority: bool = False
    """Whether it ran before everything else on the machine."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Largest resident size of this rank's process during one step; on a GPU, most memory of it that its tensors took."""
    spans: dict[str, tuple[tuple[tuple[Span, ...], ...], ...]] = field(default_factory=dict)
    """By variant, of each phase and each traced step this rank's spans."""
