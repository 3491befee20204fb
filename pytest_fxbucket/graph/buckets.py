"""What is read off a graph: its launches with their members, and the compute that uses what they bring. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph import collectives

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Direction
    from pytest_fxbucket.graph.feeds import Update
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.graph.overwritten import Read


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


@dataclass(frozen=True, slots=True)
class Bucket:
    """One launch as the graph has it. Positions count the graph's nodes."""

    kind: collectives.Kind
    op: str
    group: str
    dtype: torch.dtype | None
    """None if it launches tensors of several."""
    numel: int
    """Elements of the larger side: the gathered result, or the input that is reduced."""
    bytes: int
    """Size of the larger side."""
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
    apart: str = ""
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

    @property
    def fqns(self) -> tuple[str, ...]:
        """Members in byte order."""
        return tuple(member.fqn for member in self.members)


@dataclass(frozen=True, slots=True)
class Reading:
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
    overwritten: tuple[Read, ...] = ()
    """Who reads what of inputs that are written in place."""
    late: frozenset[int] = frozenset()
    """Positions of what is done for the call before: its reductions and updates, in steady and clean-up graphs."""
    begun: frozenset[str] = frozenset()
    """Names of nodes at which gradients begin though they only move data (:mod:`pytest_fxbucket.graph.begun`)."""
    order: Order | None = field(default=None, compare=False, repr=False)
    """Of the graph that was read, whose nodes it names by position."""

    @property
    def updating_names(self) -> frozenset[str]:
        """Names of the nodes that update parameters."""
        return frozenset(self.order.nodes[where].name for where in self.updating) if self.order is not None else frozenset()
