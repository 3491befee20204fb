"""What a simulated step did: when each node ran on which stream, what communication was exposed, what lived at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pytest_fxbucket.cost.memory import Kind as MemoryKind
    from pytest_fxbucket.graph.collectives import Kind as CollectiveKind
    from pytest_fxbucket.step.roles import Direction, Phase

Why = Literal["", "too little compute", "waited for too early", "behind another launch", "launched too late", "memory"]
"""Why a collective is exposed. In the order above: there is too little compute to hide it; its result is read long after its
wait; its stream was busy with the launch before; it could have been launched earlier, and memory allows that ("launched too
late") or does not ("memory"). Empty if it is hidden."""
HIDDEN = 1e-9
"""Seconds of exposure that count as none: rounding of sums."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One collective, from its launch to its wait. Times are seconds since the step began."""

    node: str
    """Name of the launching node."""
    phase: Phase
    place: int
    """Position of that node in its graph."""
    kind: CollectiveKind
    group: str
    direction: Direction
    bytes: int
    """Of the larger of input and output."""
    launched: float
    """When it was launched, and the compute called before that had run."""
    start: float
    end: float
    waited: float
    """When the first wait for it began; the end of the collective if nothing waits for it."""
    exposed: float
    """Seconds that waits for it blocked compute."""
    why: Why
    behind: str = ""
    """Name of the launch before it on its stream, if :attr:`why` is "behind another launch"; else empty."""
    times: int = 1
    """How often a step runs it: in a pipeline stage's work once for each microbatch."""

    @property
    def seconds(self) -> float:
        """Seconds in flight."""
        return self.end - self.start

    @property
    def is_hidden(self) -> bool:
        """Whether no wait for it blocked compute."""
        return self.exposed <= HIDDEN


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """One node on a stream."""

    node: str
    phase: Phase
    place: int
    stream: str
    """compute, host copies, or the name of a process group."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PeakStorages:
    """The storages of one kind and module that live at the peak, summed."""

    kind: MemoryKind
    module: str
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """One step on one rank."""

    seconds: float
    """From its first node to the end of the last."""
    compute: float
    """Seconds that compute took, without what held it up."""
    flights: tuple[Flight, ...]
    """In the order of their launches."""
    peak_bytes: int
    peak_node: str
    """Name of the first node that runs while ``peak_bytes`` live."""
    peak_phase: Phase
    living: tuple[PeakStorages, ...]
    """Storages that live at the peak, by kind and module, the largest first."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """By name of the launching node the bytes of its input and output buffers that live at the peak, the largest first."""
    ran: tuple[NodeSpan, ...] = field(default=(), repr=False)
    streams: Mapping[str, float] = field(default_factory=dict)
    """Seconds of work on each stream."""

    @property
    def exposed(self) -> float:
        """Seconds that waits blocked compute."""
        return sum(one.exposed for one in self.flights)

    @property
    def rest(self) -> float:
        """Seconds in which compute neither ran nor was held up by a wait: the host was late, or the last launch flew on."""
        return max(0.0, self.seconds - self.compute - self.exposed)

    @property
    def hidden(self) -> int:
        """How many collectives are hidden."""
        return sum(one.is_hidden for one in self.flights)
