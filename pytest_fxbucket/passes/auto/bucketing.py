"""Merges collectives as long as what hides them still does.

Collectives of a stream stand one behind the other, each as late as it can be
(:mod:`pytest_fxbucket.passes.auto.latest_starts`). Two neighbours that may share a launch become one, which can start when the
inputs of both are there, and must end when the first of their results is needed. The merge stays if no collective of the
stream must then start before it can, unless it had to before, and by no more than that. A merge saves one latency, so that all
collectives before it on the stream may start later. A bucket whose latency is a small part of its flight has nothing to win
from more members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import fx

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.cost.memory import StorageNeeds
from pytest_fxbucket.passes.auto.headroom import Headroom
from pytest_fxbucket.passes.auto.latest_starts import DRIFT, ideal, latest
from pytest_fxbucket.passes.auto.machine import machine_of
from pytest_fxbucket.passes.auto.sweep import lazy
from pytest_fxbucket.passes.auto.windows import Nodes, Windows

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.auto.estimates import Estimates
    from pytest_fxbucket.passes.auto.windows import MovableCollective
    from pytest_fxbucket.passes.grouping import Group
    from pytest_fxbucket.passes.targets import MergeTarget
    from pytest_fxbucket.plan.schema_bucket import Overlap

_SATURATED = 0.05
"""A bucket whose latency is less than this share of its flight wins nothing from more bytes."""
_SAME = 1e-9


@dataclass(slots=True, eq=False)
class _Job:
    """A bucket in the making, on its stream."""

    release: float
    """When what it sends is there, at the earliest."""
    deadline: float
    seconds: float
    late: float
    """When it must start."""
    bytes: int
    members: list[MergeTarget]
    flights: list[MovableCollective]


class HidingBefore:
    """What a graph's collectives hide behind, before anything is merged."""

    def __init__(self, order: Order, estimates: Estimates, rules: Overlap) -> None:
        graph = order.nodes[0].graph
        machine = machine_of(order.nodes, estimates)
        needs = StorageNeeds(graph, estimates.cluster.rounding)
        self._windows = windows = Windows(Nodes(order, machine), needs)
        self._times = ideal(windows)
        self._deadlines = latest(windows, self._times, DRIFT).deadlines
        basis = windows.arranged(lazy(windows))
        at = needs.at(basis)
        self._live = windows.by_slot(basis, at)
        self._room = Headroom.of(rules, needs.peak(range(len(order.nodes))))
        self._by_launch = {order.nodes[one.launch]: one for one in windows.flights}
        self._estimates = estimates
        # Seconds to pack or unpack a byte: it is read once and written once.
        self._copying = 2 / (estimates.cluster.memory_bandwidth * estimates.cluster.memory_efficiency)

    def parts(self, groups: Sequence[Group], cap: float) -> list[list[Group]]:
        """Split each of ``groups``, whose members may share a launch, into parts that stay hidden as one launch.

        ``cap`` is the most bytes that a part may have; 0: no cap.
        """
        jobs: list[list[_Job]] = [[self._job(target) for target in group] for group in groups]
        streams: dict[int, list[_Job]] = {}
        known = {target.launch for group in groups for target in group}
        for group in jobs:
            for job in group:
                streams.setdefault(job.flights[0].stream, []).append(job)
        # What nobody may merge takes its time on the stream, too.
        for launch, one in self._by_launch.items():
            if launch not in known:
                streams.setdefault(one.stream, []).append(self._of_flight(one, []))
        latency = [self._latency(group[0]) for group in groups]
        found: list[list[Group]] = []
        for stream in streams.values():
            stream.sort(key=_turn)
            _stack(stream, len(stream) - 1)
        # Those that are exposed come first: they win from a merge, and leave room for others.
        for number in sorted(range(len(jobs)), key=lambda number: min((j.late - j.release for j in jobs[number]), default=0.0)):
            jobs[number] = self._merged(jobs[number], streams, latency[number], cap)
        for group in jobs:
            parts = [tuple(sorted(job.members, key=lambda t: t.launch)) for job in group]
            found.append(sorted(parts, key=lambda part: part[0].launch))
        return found

    def _latency(self, target: MergeTarget) -> float:
        """Seconds that a flight takes even if it carries next to nothing."""
        flight = self._by_launch[target.launch]
        return min(self._estimates.of_one(_smallest(target, flight.stream)), flight.seconds)

    def _job(self, target: MergeTarget) -> _Job:
        return self._of_flight(self._by_launch[target.launch], [target])

    def _of_flight(self, one: MovableCollective, members: list[MergeTarget]) -> _Job:
        release = self._times[min(one.low, len(self._times) - 1)] + one.pack
        # ``late`` is not known before ``_stack`` has put it on its stream.
        return _Job(release, self._deadlines[one.number], one.seconds, inf, one.size, members, [one])

    def _merged(self, jobs: list[_Job], streams: dict[int, list[_Job]], latency: float, cap: float) -> list[_Job]:
        """``jobs`` of one group, as few as stay hidden; ``streams`` are kept up to date."""
        if not jobs:
            return jobs
        stream = streams[jobs[0].flights[0].stream]
        ordered = sorted(jobs, key=_turn)  # as on the stream, so that what is joined stands behind what it is joined to
        kept = [ordered[0]]
        for job in ordered[1:]:
            if not self._join(kept[-1], job, stream, latency, cap):
                kept.append(job)
        return kept

    def _join(self, into: _Job, other: _Job, stream: list[_Job], latency: float, cap: float) -> bool:
        """Let ``into`` carry what ``other`` does, if that stays hidden and has room; tell whether it was done.

        The merge is tried on ``stream`` itself, and taken back if it does not pay.
        """
        size = into.bytes + other.bytes
        if (cap and size > cap) or size > self._room.in_flight or latency < _SATURATED * into.seconds:
            return False
        was = into.release, into.deadline, into.seconds, into.late
        worst = max(0.0, into.release - into.late, other.release - other.late)
        place, at = stream.index(into), stream.index(other)
        into.release = max(into.release, other.release)
        # A gathered bucket is unpacked as a whole: its first reader also waits for the copies of what ``other`` brings.
        into.deadline = min(into.deadline, other.deadline) - self._copying * other.bytes
        # One latency of the two is saved. A cost model may say other things of latency: no merge is quicker than either flight.
        into.seconds = max(into.seconds, other.seconds, into.seconds + other.seconds - latency)
        stream.pop(at)
        changed = _stack(stream, at - 1, place)
        stays = into.release - into.late <= worst + _SAME and all(
            job.late >= min(job.release, late) - _SAME for job, late in changed if job is not into
        )
        if stays and self._lives(into, other):
            into.bytes = size
            into.members += other.members
            into.flights += other.flights
            return True
        stream.insert(at, other)
        for job, late in changed:
            job.late = late
        into.release, into.deadline, into.seconds, into.late = was
        return False

    def _lives(self, into: _Job, other: _Job) -> bool:
        """Whether memory allows that what ``other`` carries lives as long as all of the bucket; if so, it is taken."""
        if self._room.peak == inf:
            return True
        # As one gather, the later result is there when the earlier one is needed. As one reduction, the earlier inputs are held
        # until the later one is there.
        first, second = into.flights[0], other.flights[-1]
        begin, end = sorted((first.high, second.high)) if first.is_gather else sorted((first.low, second.low))
        more = second.size if first.is_gather else sum(one.size for one in into.flights)
        if begin < end and max(self._live[begin:end]) + more > self._room.peak:
            return False
        for slot in range(begin, end):
            self._live[slot] += more
        return True


def _turn(job: _Job) -> tuple[float, int]:
    """The place on its stream of a job that nothing was joined to yet."""
    return job.deadline, job.flights[0].number


def _smallest(target: MergeTarget, stream: int) -> fx.Node:
    """A launch like ``target`` that carries next to nothing, for the cost model to tell the latency of.

    Estimates are kept by name and operator of a node, so the name says all that the latency may depend on.
    """
    graph, c10d = fx.Graph(), c10d_functional()
    sent = graph.placeholder("sent")
    sent.meta["val"] = torch.empty(target.ranks, dtype=target.dtype or torch.uint8, device="meta")
    operator, args, numel = {
        "all_gather": (c10d.all_gather_into_tensor, (target.ranks,), target.ranks * target.ranks),
        "reduce_scatter": (c10d.reduce_scatter_tensor, (target.op, target.ranks), 1),
        "all_reduce": (c10d.all_reduce, (target.op,), target.ranks),
    }[target.kind]
    # Ranks must agree on names, and call process groups otherwise: their stream has the same number on all.
    name = f"smallest_{target.kind}_{target.dtype}_{stream}_{target.ranks}".replace(".", "_")
    node = graph.create_node("call_function", operator.default, (sent, *args, target.group), {}, name)
    node.meta["val"] = sent.meta["val"].new_empty(numel)
    return node


def _stack(stream: Sequence[_Job], last: int, least: int = 0) -> list[tuple[_Job, float]]:
    """Let the jobs of ``stream`` up to ``last`` start as late as they can, one behind the other.

    Gives the jobs that changed, each with its start before. It goes from ``last`` to the first job; before index ``least`` it
    ends at the first job that stays as it is, since all before that one stay, too.
    """
    end, changed = stream[last + 1].late if last + 1 < len(stream) else inf, list[tuple[_Job, float]]()
    for index in range(last, -1, -1):
        job = stream[index]
        end = min(end, job.deadline) - job.seconds
        if end != job.late:
            changed.append((job, job.late))
            job.late = end
        elif index < least:
            break
    return changed
