"""Simulates a step: a host that calls nodes in order, and streams for compute, for host copies and for each process group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.cost.costs import CostModel, Roofline, enqueue_seconds, groups_of, is_free, launched_bytes
from pytest_fxbucket.cost.memory import Liveness
from pytest_fxbucket.graph.collectives import flight_of, launch_kind, read_launch, tensors, tensors_sent
from pytest_fxbucket.graph.modules import direction_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import is_view, operator_name
from pytest_fxbucket.process import collector
from pytest_fxbucket.simulate.held_memory import memory_of
from pytest_fxbucket.simulate.timeline import HIDDEN, Flight, NodeSpan, PeakStorages, Timeline, Why

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.step.roles import Phase, StepGraph

COMPUTE, COPIES = "compute", "host copies"


def simulate(step: StepGraph, cluster: Cluster, cost: CostModel | None = None) -> Timeline:
    """Simulate one step of ``step`` as its rank runs it on ``cluster``; its graphs run one after the other.

    ``cost`` gives seconds of a node, instead of an estimate from the figures of ``cluster``. A collective starts when the
    compute that was called before its launch has run and its stream is free. A wait holds up compute until its collective ends.
    Each call costs the host its time. Linear in nodes. Raises :class:`SimulationError` for a cost that is no number of seconds.
    """
    cost = cost or Roofline(cluster, groups_of(step))
    clock = _Clock(cluster, cost)
    with collector.paused():
        liveness = memory_of(step, cluster.rounding)
        for phase, module in step.graphs.items():
            clock.run(phase, module.graph)
    peak = max(liveness, key=lambda phase: liveness[phase].peak)
    found = tuple(_Reasons(clock, liveness, cluster).flights())
    how = step.pipelined
    flights = found if how is None else tuple([replace(one, times=how.runs_of(one.phase)) for one in found])
    return Timeline(
        seconds=clock.end,
        compute=clock.work.get(COMPUTE, 0.0),
        flights=flights,
        peak_bytes=liveness[peak].peak,
        peak_node=list(step.graphs[peak].graph.nodes)[liveness[peak].peak_at].name,
        peak_phase=peak,
        living=tuple(_living(liveness[peak])),
        buffers=_buffers(liveness[peak]),
        ran=tuple(clock.ran),
        streams=dict(clock.work),
    )


@dataclass(slots=True)
class _Launched:
    """A collective while it is simulated."""

    node: fx.Node
    phase: Phase
    place: int
    group: str
    ready: float
    """When the host has launched it and all compute called before has run: its earliest start, if its stream is free."""
    start: float
    end: float
    free: float
    """When the collective launched before it on the same stream ends."""
    free_then: float
    """When the stream would have been free for a launch at :attr:`could`: the end of the launches that were ready by then."""
    behind: str
    """Name of the launch before it on the same stream; empty if it is the first."""
    could: float
    """When the tensors that it sends were ready, which is the earliest time at which it could have been launched."""
    could_place: int
    """Position of the node that made the last of those tensors; -1 if the launch could stand anywhere."""
    waited: float | None = None
    exposed: float = 0.0
    computed: float = 0.0
    """Seconds of compute before its first wait."""
    spare: float | None = None
    """Seconds of compute between its first wait and the first node that reads its result, or the end of the graph."""


class _Clock:
    """Runs nodes in order, on clocks that say how far the host and each stream have got.

    The host calls one node after the other. Compute is one stream, and each process group is one. A node starts at the latest
    of three times: when the host calls it, when its stream is free, and when what it needs is there.
    """

    def __init__(self, cluster: Cluster, cost: CostModel) -> None:
        self._cluster, self._cost = cluster, cost
        self._host = self._compute = self._begun = 0.0
        self._free: dict[str, tuple[float, str]] = {}
        """By stream the end of its last launch, and that launch's name."""
        self._told: dict[str, tuple[list[float], list[float]]] = {}
        """By process group the times at which its launches were ready, and those at which they end, both in order of launch."""
        self._there: dict[fx.Node, tuple[float, int]] = {}
        """When the value of each node could be ready at the earliest, and the position of the node that made it; -1 for a value
        that depends on the graph's inputs alone, and so could be made anywhere."""
        self._in_flight: dict[fx.Node, _Launched] = {}
        self._copied: dict[fx.Node, float] = {}
        self.launched: list[_Launched] = []
        self.ran: list[NodeSpan] = []
        self.work: dict[str, float] = {}

    @property
    def end(self) -> float:
        """When the host and all streams are done."""
        return max([self._host, self._compute, *(end for end, _ in self._free.values())])

    def run(self, phase: Phase, graph: fx.Graph) -> None:
        """Run all nodes of ``graph`` behind what ran before."""
        self._begun = max(self._host, self._compute)
        for place, node in enumerate(graph.nodes):
            kind = flight_of(node)
            if kind == "wait":
                self._wait(node)
            elif kind is not None:
                self._launch(node, phase, place)
            elif not is_free(node):
                self._call(node, phase, place)
            elif is_view(node):
                self._host += self._cluster.view
            self._note(node, place)
        # A result that its graph never reads could be waited for at the graph's end.
        for flight in self.launched:
            self._was_read(flight)

    def _was_read(self, flight: _Launched) -> None:
        if flight.waited is not None and flight.spare is None:
            flight.spare = self.work.get(COMPUTE, 0.0) - flight.computed

    def _read(self, node: fx.Node) -> None:
        for source in inputs_of(node):
            if source in self._in_flight:
                self._was_read(self._in_flight[source])

    def _note(self, node: fx.Node, place: int) -> None:
        """Note when the value of ``node`` is ready: a view's with its base, that of a wait with the collective's end."""
        # Launches and compute have been noted when they ran: left are inputs, views and waits.
        if node in self._there:
            return
        sources = [self._there[source] for source in inputs_of(node)]
        self._there[node] = max(sources, default=(self._begun, -1))
        # To read a view of what a launch brings is to read the launch's result.
        flight = next((self._in_flight[one] for one in inputs_of(node) if one in self._in_flight), None)
        if flight is not None:
            self._in_flight[node] = flight
        if copied := self._copied_by(inputs_of(node)):
            self._copied[node] = copied

    def _copied_by(self, nodes: Iterable[fx.Node]) -> float:
        """When those of ``nodes`` that a host copy brings are there; other values come from compute's own stream, in order."""
        return max((self._copied[one] for one in nodes if one in self._copied), default=0.0) if self._copied else 0.0

    def _call(self, node: fx.Node, phase: Phase, place: int) -> None:
        self._read(node)
        seconds = self._cost(node)
        self._host += self._cluster.launch
        if stream := _copies(node):
            start = max(self._host, self._compute, self._free.get(COPIES, (0.0, ""))[0])
            self._free[COPIES] = start + seconds, node.name
            self._copied[node] = start + seconds
        else:
            stream = COMPUTE
            start = max(self._host, self._compute, self._copied_by(inputs_of(node)))
            self._compute = start + seconds
            if self._cluster.blocking:
                self._host = self._compute
        self._add(NodeSpan(node.name, phase, place, stream, start, start + seconds))
        self._there[node] = (moves_data(node) and self._packed(node, seconds)) or (start + seconds, place)

    def _packed(self, node: fx.Node, seconds: float) -> tuple[float, int] | None:
        """When ``node``, which moves data, could be done if it moves graph inputs alone, which it can do anywhere; else None.

        This tells a launch of parameters, which could stand as early as one likes, from one that sends what compute makes.
        """
        sources = [self._there[source] for source in inputs_of(node)]
        if any(place >= 0 for _, place in sources):
            return None
        # Alone it takes the kernel's time or the host's for its call, whichever is longer.
        return max((there for there, _ in sources), default=self._begun) + max(seconds, self._cluster.launch), -1

    def _launch(self, node: fx.Node, phase: Phase, place: int) -> None:
        said = read_launch(node)
        assert said is not None
        self._read(node)
        seconds, (free, behind) = self._cost(node), self._free.get(said.group, (0.0, ""))
        self._host += enqueue_seconds(launched_bytes(node), self._cluster)
        # As NCCL does: the stream of the group waits for all compute that was called before, needed or not; and compute, for a
        # host copy of what is sent.
        self._compute = max(self._compute, self._copied_by(tensors_sent(node)))
        ready = max(self._host, self._compute)
        start = max(ready, free)
        could, could_place = max((self._there[one] for one in tensors_sent(node)), default=(0.0, -1))
        # For the reasons afterwards: what its stream would have had to finish first, if this launch had come at once.
        told, ended = self._told.setdefault(said.group, ([], []))
        # Both lists ascend, since neither the host's clock nor a stream's ever goes back.
        before = bisect_right(told, could)
        free_then = ended[before - 1] if before else 0.0
        end = start + seconds
        flight = _Launched(node, phase, place, said.group, ready, start, end, free, free_then, behind, could, could_place)
        told.append(ready)
        ended.append(end)
        self._free[said.group] = flight.end, node.name
        self._in_flight[node] = flight
        self._there[node] = flight.end, place
        self.launched.append(flight)
        self._add(NodeSpan(node.name, phase, place, said.group, start, flight.end))

    def _wait(self, node: fx.Node) -> None:
        flight = next((self._in_flight[one] for one in node.all_input_nodes if one in self._in_flight), None)
        if flight is None:  # launched in another graph, or not at all
            return
        # A wait blocks the compute stream and not the host, as with NCCL; where the host computes itself, both.
        now = max(self._host, self._compute)
        # Of several waits, as for parts of one result, the first decides: later ones find the collective done.
        if flight.waited is None:
            flight.waited, flight.computed = now, self.work.get(COMPUTE, 0.0)
        flight.exposed += max(0.0, flight.end - now)
        self._compute = max(self._compute, flight.end)
        if self._cluster.blocking:
            self._host = max(self._host, flight.end)
        self._host += self._cluster.waiting

    def _add(self, ran: NodeSpan) -> None:
        self.ran.append(ran)
        self.work[ran.stream] = self.work.get(ran.stream, 0.0) + ran.end - ran.start


_COPY = ("aten::_to_copy", "aten::copy_", "aten::copy")


def _copies(node: fx.Node) -> str:
    """The stream of copies, if ``node`` copies between the host and a device; else empty."""
    if operator_name(node) not in _COPY:
        return ""
    devices = {one.device.type for source in (node, *node.all_input_nodes) for one in tensors(source.meta.get("val"))}
    return COPIES if len(devices) > 1 and "cpu" in devices else ""


@dataclass(frozen=True)
class _Reasons:
    """Why each collective is exposed."""

    clock: _Clock
    liveness: Mapping[Phase, Liveness]
    cluster: Cluster

    def flights(self) -> Iterator[Flight]:
        """All collectives, in the order of their launches."""
        for one in self.clock.launched:
            kind = launch_kind(one.node)
            assert kind is not None
            why = self._why(one)
            yield Flight(
                node=one.node.name,
                phase=one.phase,
                place=one.place,
                kind=kind,
                group=one.group,
                direction=direction_of(one.node),
                bytes=launched_bytes(one.node),
                launched=one.ready,
                start=one.start,
                end=one.end,
                waited=one.end if one.waited is None else one.waited,
                exposed=one.exposed,
                why=why,
                behind=one.behind if why == "behind another launch" else "",
            )

    def _why(self, one: _Launched) -> Why:
        """The reason of its exposure: the change that would save at least half of it.

        The changes are a free stream, a wait just before the result is read, and a launch as soon as its tensors are ready.
        """
        half = one.exposed / 2
        if one.exposed <= HIDDEN:
            return ""
        if one.free - one.ready >= half:
            return "behind another launch"
        # No change saves more than what is exposed, however early the launch or late the wait could be.
        spare, late = (min(one.exposed, found) for found in (one.spare or 0.0, one.ready - max(one.could, one.free_then)))
        if max(spare, late) < half:
            return "too little compute"
        if spare >= late:
            return "waited for too early"
        return "launched too late" if self._fits(one) else "memory"

    def _fits(self, one: _Launched) -> bool:
        """Whether memory had room for its result from the earliest possible launch on."""
        liveness, size = self.liveness[one.phase], sum(tensor.nbytes for tensor in tensors(one.node.meta.get("val")))
        # From its own place on the result is counted already.
        first, last = one.could_place + 1, one.place - 1
        return first > last or liveness.most(first, last) + size <= self.cluster.memory


def _living(liveness: Liveness) -> Iterator[PeakStorages]:
    """Storages that live at the peak, summed by kind and module, the largest first."""
    together: dict[tuple[str, str], PeakStorages] = {}
    for one in liveness.alive(liveness.peak_at):
        key = one.kind, one.module
        before = together.get(key, PeakStorages(one.kind, one.module, 0))
        together[key] = replace(before, bytes=before.bytes + one.bytes)
    yield from sorted(together.values(), key=lambda one: (-one.bytes, one.kind, one.module))


def _buffers(liveness: Liveness) -> dict[str, int]:
    """By launch the bytes at the peak of storages that it makes, or that it reads, the largest first."""
    found: dict[str, int] = {}
    for one in liveness.alive(liveness.peak_at):
        nodes = (one.maker, *one.maker.users) if one.maker.op == "call_function" else ()
        launch = next((node.name for node in nodes if launch_kind(node) is not None), "")
        if launch:
            found[launch] = found.get(launch, 0) + one.bytes
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
