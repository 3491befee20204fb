"""Marks: where in a graph launches, waits and each module's compute begin; and spans: when they ran on a rank. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.golden.schedule import entry_text
from pytest_fxbucket.graph.collectives import is_wait, launch_kind
from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.graph.movement import moves_data

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Phase


Kind = Literal["launch", "wait", "compute", "flight"]
COMPUTE, COMMUNICATION = "compute", "communication"
"""Streams of a rank without a GPU."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one step on one rank."""

    rank: int
    stream: str
    """compute: the rank's own thread; communication: collectives in flight; on a GPU a stream, "stream 7"."""
    kind: Kind
    """launch: the call that starts a collective; wait: the call that blocks until the collective has ended, which is exposed
    time; flight: from the launch until the end of its wait; compute: everything else."""
    label: str
    """"all_gather layers.3"; of compute the FQN of its module."""
    direction: str
    """forward, backward or optimizer."""
    start_ns: int
    """Since the step began; ranks of one machine share the clock."""
    end_ns: int
    bucket: int = -1
    """Index of its bucket in the graph's reading; -1 if it belongs to none."""


BUCKETED = "bucketed"
UNBUCKETED = "unbucketed"
"""The variant whose launches the plan's entries do not name: each is of a parameter."""

IN_ONE_CALL = "in_one_call"
"""The variant, for a step whose work crosses iterations, without the transformation that moves the work."""

ELSEWHERE = "what another graph launched"
"""Label of a wait in a backward graph for a collective that the forward graph launched."""


@dataclass(frozen=True, slots=True)
class ActivityMark:
    """The work that a rank does from ``node`` on, in graph order, up to the node of the next mark."""

    node: str
    """Name of the first node; a launch or a wait has only this one."""
    kind: Kind
    """launch, wait or compute."""
    label: str
    """"all_gather layers.3"; of compute the FQN of its module ("" outside of any), "copy-in layers.3" of what packs a bucket,
    "copy-out layers.3" of what unpacks one."""
    direction: str
    bucket: int = -1
    """Index in the graph's reading; -1 of compute."""

    def renumbered(self, first: int) -> ActivityMark:
        """The same mark in a numbering of buckets in which ``first`` others come before."""
        return replace(self, bucket=self.bucket + first) if self.bucket >= 0 else self

    def span(self, rank: int, stream: str, start_ns: int, end_ns: int, kind: Kind | None = None) -> Span:
        """A span of this mark, from ``start_ns`` to ``end_ns``; ``kind`` is given if it is not the mark's own."""
        return Span(rank, stream, kind or self.kind, self.label, self.direction, start_ns, end_ns, self.bucket)


def marks_of(world: PlanOnMesh, rank: int, phase: Phase, variant: str) -> tuple[ActivityMark, ...]:
    """The marks of a graph of ``rank``: before the pass for the unbucketed variant, else as ``world``'s pass made it."""
    if variant == UNBUCKETED:
        return marks_in(world.reference_reading(rank)[phase], {})
    return marks_in(world.final(rank)[phase].reading, world.entry_of)


def marks_in(reading: GraphAnalysis, entry_of: Mapping[str, str]) -> tuple[ActivityMark, ...]:
    """The marks of a graph; ``entry_of`` has the entry of each FQN, which names launches. Without one the FQN does."""
    assert reading.order is not None
    return tuple(_Walk(reading, reading.order.nodes, labels_of(reading.buckets, entry_of)).marks())


def labels_of(buckets: Iterable[Bucket], entry_of: Mapping[str, str]) -> list[str]:
    """A label for each bucket, ``all_gather layers.3``; the second of that name in its direction ends in ``#2``."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for bucket in buckets:
        label = f"{bucket.kind} {entry_text(bucket, entry_of)}"
        number = seen[bucket.direction, label] = seen.get((bucket.direction, label), 0) + 1
        found.append(f"{label} #{number}" if number > 1 else label)
    return found


class _Walk:
    """One walk over the nodes, which opens a mark at each launch and wait, and where compute's module or direction changes."""

    def __init__(self, reading: GraphAnalysis, nodes: tuple[fx.Node, ...], labels: list[str]) -> None:
        self.reading, self.nodes, self.labels = reading, nodes, labels
        self.launches = {bucket.launch: i for i, bucket in enumerate(reading.buckets)}
        self.waits = {where: i for i, bucket in enumerate(reading.buckets) for where in bucket.waits}
        self.directions = {where: direction for where, direction, _ in (*reading.computes, *reading.products)}
        self.copied_in = _copied_in(nodes[where] for where in self.launches)
        self.is_marked = any(direction_of(node) == "backward" for node in nodes)
        # Nodes before the first whose direction is known count to that one's.
        self.direction: str = next((self.directions[where] for where in sorted(self.directions)), "forward")
        self.label = ""

    def marks(self) -> Iterator[ActivityMark]:
        """In graph order; the first stands at the first node that is no input."""
        running: tuple[str, str] | None = None
        for where, node in enumerate(self.nodes):
            if node.op in ("placeholder", "output"):
                continue
            if (communication := self._communication(where, node)) is not None:
                running = None  # compute after it needs a mark of its own, even in the same module
                yield communication
                continue
            if running is None or not _may_stay(node):
                self._enter(where, node)
            if running != (self.label, self.direction):
                running = self.label, self.direction
                yield ActivityMark(node.name, "compute", *running)

    def _communication(self, where: int, node: fx.Node) -> ActivityMark | None:
        bucket = self.launches.get(where, self.waits.get(where))
        if bucket is not None:
            kind: Kind = "launch" if where in self.launches else "wait"
            return ActivityMark(node.name, kind, self.labels[bucket], self.reading.buckets[bucket].direction, bucket)
        if is_wait(node):
            return ActivityMark(node.name, "wait", ELSEWHERE, self._direction(where, node))
        return None

    def _enter(self, where: int, node: fx.Node) -> None:
        self.direction = self._direction(where, node)
        entry = node.meta.get("fxbucket_entry")
        if isinstance(entry, str):
            # Pack and unpack of a bucket have the same entry; only the pack leads to a launch.
            self.label = f"copy-{'in' if node in self.copied_in else 'out'} {entry}"
        else:
            self.label = module_of(node)

    def _direction(self, where: int, node: fx.Node) -> str:
        if where in self.reading.updating:
            return "optimizer"
        if where in self.directions:
            return self.directions[where]
        # In a graph whose nodes have no direction in their meta, a node has that of the node before it.
        return direction_of(node) if self.is_marked else self.direction


def _may_stay(node: fx.Node) -> bool:
    """Whether ``node`` counts to the module that runs: a view or copy, of no known module and no bucket."""
    return moves_data(node) and not module_of(node) and "fxbucket_entry" not in node.meta


def _copied_in(launches: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that pack buckets: those with an entry, on the way to ``launches``, without launches and waits themselves."""
    found: set[fx.Node] = set()
    queue = list(launches)
    for node in queue:
        for source in node.all_input_nodes:
            if "fxbucket_entry" in source.meta and source not in found and not is_wait(source) and launch_kind(source) is None:
                found.add(source)
                queue.append(source)
    return found
