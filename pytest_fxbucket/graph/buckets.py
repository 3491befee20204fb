"""The reading of a graph as data: launches with their members, readers of their results, lifetimes of gathered bytes."""

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
    """Fewest bits of mantissa that it had anywhere on the way from its source to its readers."""
    dtype: torch.dtype = torch.float32
    """Dtype of its elements in the launch; the launch itself may send bytes (uint8)."""
    last_use: int | None = None
    """Position of the last node that reads it behind the wait."""

    @property
    def bytes(self) -> int:
        """Size in a rank's part of the launch."""
        return self.numel * self.dtype.itemsize


# The launches of a graph with their members, and the compute that uses their results. Plain data.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket(collectives.Collective):
    """One launch as the graph has it. Positions count the graph's nodes."""

    numel: int
    """Elements of the larger side."""
    parts: int
    """How many ranks' parts the larger side has: the size of the group; 1 for an all-reduce."""
    members: tuple[Member, ...]
    """In byte order."""
    direction: Direction
    launch: int
    wait: int | None
    """Position of the first wait; None if nobody waits."""
    first_use: int | None
    """First compute that reads a member after the wait; for a reduction the output counts too."""
    backward_use: int | None
    """First compute of the backward that reads a member."""
    node: str
    """Name of the launching node, for messages only."""
    module: str = ""
    """FQN of the innermost module that the launch ran in; empty if its tracer does not say."""
    unmergeable: str = ""
    """Why no pass may merge the launch with others; empty if one may."""
    blocked: int = -1
    """Position of the last node that the launch needs and that cannot be hoisted with it; -1 if there is none."""
    waits: tuple[int, ...] = ()
    """Positions of all waits, ascending."""
    source: int | None = None
    """Of a broadcast: index in the group of the rank that sends."""
    needed: int | None = None
    """Position of the first launch that needs the result, along any path; None if none does."""
    round: int = 0
    """Of an all-gather: how many gathers of the same parameter stand before it in its direction, as one for each microbatch."""
    idle: int | None = None
    """Of an all-gather: position of the last view or copy of the result that nobody reads, which holds it until then."""
    level: int = 0
    """Of a reduction: how many reductions its members went through before (hybrid sharding); the most of any member."""

    fqns: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """FQNs of the members, in byte order."""

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
    """Data that could not be followed or is jumbled, a sentence each."""
    last: int
    """Position of the output."""
    seen_as: tuple[tuple[str, str], ...] = ()
    """(FQN, dtypes) of each gathered parameter whose bits compute reads as another dtype; sorted."""
    products: tuple[tuple[int, Direction, str], ...] = ()
    """(position, direction, FQN) of each product of activations alone, as in attention; FQN: the last parameter read before."""
    names: tuple[str, ...] = ()
    """Names of all nodes that neither communicate nor move data, in order."""
    updating: frozenset[int] = frozenset()
    """Positions of the nodes that update parameters, and of the nodes that are computed for that alone."""
    updates: tuple[Update, ...] = ()
    """For each updated parameter and state the gradients and inputs that it is made of."""
    overwritten: tuple[InputReader, ...] = ()
    """Readers of inputs that are written in place, and whether each reads the old value or a new one."""
    late: frozenset[int] = frozenset()
    """Positions of nodes that finish the call before (its reductions and updates), in steady and clean-up graphs."""
    begun: frozenset[str] = frozenset()
    """Names of nodes at which gradients begin though they only move data (:mod:`pytest_fxbucket.graph.gradients`)."""
    order: Order | None = field(default=None, compare=False, repr=False)
    """Order of the graph that was read; it has the graph's nodes, by position."""

    @property
    def updating_names(self) -> frozenset[str]:
        """Names of the nodes that update parameters."""
        return frozenset(self.order.nodes[where].name for where in self.updating) if self.order is not None else frozenset()

    def last_read(self, among: Container[str]) -> str | None:
        """FQN of the parameter ``among`` the given ones that forward compute reads last; None if it reads none of them."""
        read = (fqn for _, direction, fqn in reversed(self.computes) if direction == "forward" and fqn in among)
        return next(read, None)


# Does a reader of a parameter, state or buffer that the graph writes in place see the old value or the new one?
#
# An all-gather reads its input until its wait, unless it sends a copy. A pass gives packs and launches other names, so a launch
# (and what packs for it) is known by its kind and direction, and only compute by the name of its node.


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
    """Position at which ``reader`` is done with its inputs: its own or, for a launch, that of the last wait."""
    if collectives.launch_kind(reader) is None:
        return order.index[reader]
    return max((order.index[wait] for wait in collectives.waits_of(reader)), default=len(order.nodes))


def _names(reader: fx.Node, direction: Mapping[str, str]) -> list[str]:
    """What ``reader`` is known by: each launch that it is or moves data to, else its own name."""

    def onward(node: fx.Node) -> Iterable[fx.Node]:
        return (
            (one for one in node.users if collectives.launch_kind(one) is not None or _goes_on(one)) if _goes_on(node) else ()
        )

    kinds = [(node, collectives.launch_kind(node)) for node in reached([reader], onward)]
    return [f"{kind} in {direction.get(node.name, 'forward')}" for node, kind in kinds if kind is not None] or [reader.name]


def _goes_on(node: fx.Node) -> bool:
    return node.op == "call_function" and moves_data(node) and not collectives.is_wait(node)


# How many gathered bytes are alive at each position of a schedule; a member lives from its launch to its last reader.


Lives = list[tuple[int, int, int]]
"""(first position, last position, bytes) of each gathered tensor; both ends included."""


def gathered_lives(reading: GraphAnalysis) -> Lives:
    """The life of each gathered member. A member that nobody reads lives until its wait."""
    lives: Lives = []
    for bucket in reading.buckets:
        if bucket.kind == "all_gather":
            for member in bucket.members:
                end = member.last_use if member.last_use is not None else bucket.wait
                last = max(end or 0, bucket.idle or 0, bucket.launch)
                lives.append((bucket.launch, last, member.bytes * bucket.parts))
    return lives


def live_bytes(lives: Lives, places: Iterable[int]) -> list[int]:
    """Bytes alive at each of ``places``, which ascend."""
    # A sweep over births and deaths. A member dies behind its last position, at which it still counts.
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
    # Bytes only grow where something is launched, so no other position needs a look.
    return max(live_bytes(lives, sorted({first for first, _, _ in lives})), default=0)
