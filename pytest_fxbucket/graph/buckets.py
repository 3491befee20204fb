"""What is read off a graph: launches with their members, who reads what they bring, how long gathered bytes live."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import is_view
from pytest_fxbucket.graph.walks import reached

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.graph.update_provenance import Update
    from pytest_fxbucket.step.roles import Direction, Value


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter (or its gradient) in a launch."""

    fqn: str
    """Empty if what is sent is no parameter and no parameter's gradient."""
    offset: int
    """Bytes before it in a rank's part of the launch."""
    numel: int
    """Elements of it in a rank's part of the launch."""
    precision: int
    """Fewest bits of mantissa it was squeezed through on its way to where it is read."""
    dtype: torch.dtype = torch.float32
    """Of its elements in the launch, which may itself carry bytes."""
    last_use: int | None = None
    """Last node that reads what arrived of it."""

    @property
    def bytes(self) -> int:
        """Size in a rank's part of the launch."""
        return self.numel * self.dtype.itemsize


# What is read off a graph: its launches with their members, and the compute that uses what they bring. Plain data.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket(collectives.Collective):
    """One launch as the graph has it. Positions count the graph's nodes."""

    numel: int
    """Elements of the larger side."""
    parts: int
    """Ranks whose parts the larger side has: all of the group; one for an all-reduce."""
    members: tuple[Member, ...]
    """In byte order."""
    direction: Direction
    launch: int
    wait: int | None
    """First wait for it; None if nobody waits."""
    first_use: int | None
    """First compute that reads a member after the wait; for a reduction the output counts too."""
    backward_use: int | None
    """First compute of the backward that reads a member."""
    node: str
    """Name of the launching node, for messages only."""
    module: str = ""
    """FQN of the innermost module that it ran in, as far as its tracer says."""
    unmergeable: str = ""
    """Why no pass may merge it with others; empty if it may."""
    blocked: int = -1
    """Position of the last node that it needs and that cannot be hoisted with it; -1 if there is none."""
    waits: tuple[int, ...] = ()
    """All waits for it, ascending."""
    source: int | None = None
    """Index in the group of the rank whose bytes all get, of a broadcast."""
    needed: int | None = None
    """Position of the first launch that needs what it brings, through any path; None if none does."""
    round: int = 0
    """Of an all-gather: how many others of its parameter stand before it in its direction. Each microbatch has one."""
    level: int = 0
    """Of a reduction: how many others its members went through before, as in hybrid sharding; the most of any."""

    fqns: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Of the members, in byte order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fqns", tuple(member.fqn for member in self.members))


@dataclass(frozen=True, slots=True)
class GraphAnalysis:
    """A whole graph, read."""

    buckets: tuple[Bucket, ...]
    """Every launch, in order."""
    computes: tuple[tuple[int, Direction, str], ...]
    """(position, direction, FQN): compute that reads a parameter, or makes a gradient that is reduced."""
    problems: tuple[str, ...]
    """What could not be followed, or is jumbled; one sentence each."""
    last: int
    """Position of the output."""
    seen_as: tuple[tuple[str, str], ...] = ()
    """(FQN, dtypes) of each gathered parameter whose bits compute reads as another dtype; sorted."""
    products: tuple[tuple[int, Direction, str], ...] = ()
    """(position, direction, FQN): products of activations alone, as in attention, by the last parameter read on the way."""
    names: tuple[str, ...] = ()
    """Names of all nodes that neither communicate nor move data, in order."""
    updating: frozenset[int] = frozenset()
    """Positions of the nodes that update parameters, and of what is computed for that alone."""
    updates: tuple[Update, ...] = ()
    """What each updated parameter, and state of it, is made of."""
    overwritten: tuple[InputReader, ...] = ()
    """Who reads what of inputs that are written in place."""
    late: frozenset[int] = frozenset()
    """Positions of what is done for the call before: its reductions and updates, in steady and clean-up graphs."""
    begun: frozenset[str] = frozenset()
    """Names of nodes at which gradients begin though they only move data (:mod:`pytest_fxbucket.graph.gradients`)."""
    order: Order | None = field(default=None, compare=False, repr=False)
    """Of the graph that was read, whose nodes it names by position."""

    @property
    def updating_names(self) -> frozenset[str]:
        """Names of the nodes that update parameters."""
        return frozenset(self.order.nodes[where].name for where in self.updating) if self.order is not None else frozenset()

    def last_read(self, among: Container[str]) -> str | None:
        """FQN of that parameter ``among`` some which forward compute reads last; None if it reads none."""
        read = (fqn for _, direction, fqn in reversed(self.computes) if direction == "forward" and fqn in among)
        return next(read, None)


# Who reads what of a parameter, a state or a buffer that the graph writes in place: the old value or the new one.
#
# An all-gather reads its input until its wait, unless it sends a copy. A launch is known by what it gathers, compute by the
# name of its node: passes give packs and launches other names.


@dataclass(frozen=True, slots=True)
class InputReader:
    """One reader of an input that is written in place."""

    fqn: str
    reader: str
    """``all_gather in backward``, ``all_gather in forward (2)``, or the name of a node."""
    writers: tuple[str, ...]
    """Nodes that have written it when the reader is done, in order; empty: it reads the value that the step began with."""


def reads_of_written(order: Order, inputs: Sequence[Value], buckets: Sequence[Bucket]) -> Iterator[InputReader]:
    """Every reader and writer of each input that is written in place, in order of the inputs, then of the graph."""
    placeholders = [node for node in order.nodes if node.op == "placeholder"]
    direction = {bucket.node: bucket.direction for bucket in buckets}
    for node, value in zip(placeholders, inputs, strict=True):
        writers = order.writing(node)
        if writers:
            yield from _reads(order, node, value.fqn, writers, direction)


def _reads(
    order: Order, node: fx.Node, fqn: str, writers: Sequence[int], direction: Mapping[str, str]
) -> Iterator[InputReader]:
    counts: dict[str, int] = {}
    readers = sorted({index for storage in order.storages(node) for index in order.readers(storage)}.union(writers))
    for index in readers:
        reader = order.nodes[index]
        if reader.op == "output" or is_view(reader) or collectives.is_wait(reader):
            continue
        end = _end(order, reader)
        seen = tuple(order.nodes[writer].name for writer in writers if writer < end)
        for name in _names(reader, direction):
            counts[name] = counts.get(name, 0) + 1
            yield InputReader(fqn, name if counts[name] == 1 else f"{name} ({counts[name]})", seen)


def _end(order: Order, reader: fx.Node) -> int:
    """Where ``reader`` is done with what it reads."""
    if collectives.launch_kind(reader) is None:
        return order.index[reader]
    return max((order.index[wait] for wait in collectives.waits_of(reader)), default=len(order.nodes))


def _names(reader: fx.Node, direction: Mapping[str, str]) -> list[str]:
    """What ``reader`` is known by: launches that it is, or copies for, or its own name."""

    def onward(node: fx.Node) -> Iterable[fx.Node]:
        return (
            (one for one in node.users if collectives.launch_kind(one) is not None or _goes_on(one)) if _goes_on(node) else ()
        )

    kinds = [(node, collectives.launch_kind(node)) for node in reached([reader], onward)]
    return [f"{kind} in {direction.get(node.name, 'forward')}" for node, kind in kinds if kind is not None] or [reader.name]


def _goes_on(node: fx.Node) -> bool:
    return node.op == "call_function" and moves_data(node) and not collectives.is_wait(node)


# How many gathered bytes are alive at each place of a schedule: from a member's launch to its last reader.


Lives = list[tuple[int, int, int]]
"""(first position, last position, bytes) of each gathered tensor; both ends included."""


def gathered_lives(reading: GraphAnalysis) -> Lives:
    """Of each gathered member. A member that nobody reads lives until its wait."""
    lives: Lives = []
    for bucket in reading.buckets:
        if bucket.kind == "all_gather":
            for member in bucket.members:
                end = member.last_use if member.last_use is not None else bucket.wait
                lives.append((bucket.launch, bucket.launch if end is None else end, member.bytes * bucket.parts))
    return lives


def live_bytes(lives: Lives, places: Iterable[int]) -> list[int]:
    """Bytes alive at each of ``places``, which ascend."""
    events = sorted([(first, size) for first, _, size in lives] + [(last + 1, -size) for _, last, size in lives])
    found: list[int] = []
    alive = at = 0
    for place in places:
        while at < len(events) and events[at][0] <= place:
            alive += events[at][1]
            at += 1
        found.append(alive)
    return found


def peak_bytes(lives: Lives) -> int:
    """Most bytes alive at once."""
    return max(live_bytes(lives, sorted({first for first, _, _ in lives})), default=0)
