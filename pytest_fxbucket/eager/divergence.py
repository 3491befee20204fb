"""Where an eager step parts from a graph: the first operator of a module whose results are not among the graph's values.

Operators are seen as they are called. In forward an operator belongs to the module whose forward runs, in backward to the
module of the autograd node that runs. What wraps the model (gathers, reductions, copies into buckets) is left out: a graph has
other buckets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_fxbucket.checks.bitwise.localise import bits_digest
from pytest_fxbucket.compat import pytree, tracing
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode
from pytest_fxbucket.compat.modules import plain_fqn
from pytest_fxbucket.eager.trainer import local
from pytest_fxbucket.graph.collectives import REDUCTIONS

if TYPE_CHECKING:
    from types import FrameType

    from pytest_fxbucket.checks.bitwise.job import BitwiseTask
    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.step.roles import Direction

_LOSS = "the loss"
_UNDEFINED = ("aten::empty", "aten::new_empty")
"""Operators whose values mean nothing until they are written."""
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "pytest_fxbucket.ranks.")
"""Python modules whose operators are no part of a model. The last one has process groups that sum in rank order."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first operator whose result the graph has not computed; all fields are empty if there is none."""

    module: str = ""
    """FQN, or "the loss"."""
    operator: str = ""
    direction: Direction = "forward"


def first_divergence(model: nn.Module, known: Collection[str], take: Callable[[], object]) -> Divergence:
    """Run ``take()``, a step of ``model``, and follow it; ``known`` are digests of all values that the graph computed."""
    follower = _Follower(known)
    with _bodies(model, follower), follower:
        take()
    return follower.first()


@dataclass(slots=True)
class _Missing:
    """An operator that the graph has not computed."""

    first: Divergence
    node: int | None = None
    """Number of its autograd node, if it is one of forward's that has one."""
    is_read: bool = True
    """Whether what it made goes into something that counts; where there is an autograd node, backward says it instead."""
    made_of: Sequence[_Missing] = ()
    """Those without an autograd node that it reads."""

    def mark_read(self) -> None:
        """It counts, and so do those that it is made of."""
        if not self.is_read:
            self.is_read = True
            for one in self.made_of:
                one.mark_read()


class _Follower(TorchDispatchMode):
    """Sees every operator; ``inside`` are the FQNs of the modules whose forwards run."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()
        self.inside: list[str] = []
        self._known = known
        self._module_of: dict[int, str] = {}
        self._missing: list[_Missing] = []
        """In order."""
        self._unread: dict[int, tuple[torch.Tensor, _Missing]] = {}
        """Tensors that the graph has not computed and autograd does not follow, by identity, and what made them."""
        self._ran: set[int] = set()
        """Numbers of the autograd nodes that backward runs, some of which, as those of sums, call no operator."""
        self._is_backward = False
        self._last = -1

    def first(self) -> Divergence:
        """The first operator that the graph has not computed.

        What backward passes by, or no other such operator reads, is left out: a graph need not compute it.
        """
        counts = (one for one in self._missing if (one.is_read if one.node is None else one.node in self._ran))
        return next((one.first for one in counts), Divergence())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        running = tracing.current_autograd_node()
        node = tracing.autograd_number(running) if running is not None else None
        # Autograd numbers its node for an operator before it calls what is seen here, so the last number is this operator's,
        # if it has a node at all: that of the one before is not.
        last = tracing.next_autograd_number() - 1
        own, self._last = (last if last != self._last and node is None else None), last
        read = [self._unread[id(one)][1] for one in pytree.tensors_in((args, kwargs)) if id(one) in self._unread]
        if func._schema.name.startswith(_UNDEFINED) or _is_wrappers(in_backward=node is not None):
            for one in read:
                one.mark_read()
            return made
        if node is not None:
            self._is_backward = True
            self._ran.update(map(tracing.autograd_number, tracing.nodes_behind(running, self._ran)))
        module = self._module(node, last)
        lacks = [one for one in pytree.tensors_in(made) if one.numel() and bits_digest([local(one)]) not in self._known]
        if module is not None and lacks:
            # What autograd follows counts by itself, and what writes to a tensor that does.
            writes = func._schema.is_mutable and id(args[0] if args else None) not in self._unread
            counts = own is not None or node is not None or writes
            found = Divergence(module, str(func), "backward" if node is not None else "forward")
            self._missing.append(missing := _Missing(found, own, False, read))
            if counts:
                missing.mark_read()
            else:
                self._unread |= {id(one): (one, missing) for one in lacks}
        return made

    def _module(self, node: int | None, last: int) -> str | None:
        """The module of an operator, which autograd node number ``node`` calls, if any; None if it belongs to no module.

        ``last`` is the number of the last node that autograd made.
        """
        if not self.inside and node is not None:
            return self._module_of.get(node)
        # Outside of modules there is the loss, behind a first module and before backward. All else is no part of the model.
        if not self.inside and (self._is_backward or not self._module_of):
            return None
        module = self.inside[-1] if self.inside else _LOSS
        self._module_of[last] = module
        return module


def _is_wrappers(*, in_backward: bool) -> bool:
    """Whether an operator was called by what wraps the model, not by the model's own code or its backward.

    Forward runs below this module; process groups call some operators in threads of their own.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) != __name__:
        if name.startswith(_WRAPPERS):
            return True
        frame = frame.f_back
    return frame is None and not in_backward


@contextmanager
def _bodies(model: nn.Module, follower: _Follower) -> Iterator[None]:
    """While inside, ``follower`` knows which module's forward runs."""
    # Some modules have a ``forward`` of their own, as recomputed ones do: that is put back. Others have their class's again.
    before = [(module, module.__dict__.get("forward")) for module in model.modules()]
    for fqn, module in model.named_modules():
        module.forward = partial(_body, follower, plain_fqn(fqn, model), module.forward)
    try:
        yield
    finally:
        for module, forward in before:
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


def _body(follower: _Follower, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    follower.inside.append(fqn)
    try:
        return forward(*args, **kwargs)
    finally:
        follower.inside.pop()


# Members of a reduction that lie at other bytes than in torch's own: round a ring their place changes the order of their sums.


def moved(reading: GraphAnalysis, units: Mapping[str, Sequence[str]], differing: Collection[str], torchs: str) -> str:
    """A sentence on the first member that lies at another byte than in torch's own reduction; empty if there is none.

    Reductions of a ``differing`` gradient are looked at, members in byte order. ``units`` are FQNs by torch's unit, in
    registration order, which is the order of bytes there.
    """
    for bucket in reading.buckets:
        if (
            bucket.kind in REDUCTIONS
            and any(fqn in differing for fqn in bucket.fqns)
            and (found := _first(reading, bucket, units))
        ):
            unit, fqn, here, there = found
            return (
                f"{bucket.kind} of {unit}: its first member that moved is {fqn}, at byte {here} of a rank's part, and at byte "
                f"{there} in {torchs}; where a ring adds, the order of a sum depends on that"
            )
    return ""


def _first(reading: GraphAnalysis, bucket: Bucket, units: Mapping[str, Sequence[str]]) -> tuple[str, str, int, int] | None:
    """(unit, FQN, offset here, offset in torch's) in bytes."""
    # A unit's gradients may be reduced in several buckets here: sizes come from all of the same kind, level and round.
    same = [one for one in reading.buckets if (one.kind, one.level, one.round) == (bucket.kind, bucket.level, bucket.round)]
    sizes = {member.fqn: member.bytes for one in same for member in one.members}
    for member in bucket.members:
        unit = next((name for name, fqns in units.items() if member.fqn in fqns), "")
        if not unit:
            continue
        before = units[unit][: units[unit].index(member.fqn)]
        there = sum(sizes.get(fqn, 0) for fqn in before)
        if there != member.offset:
            return unit, member.fqn, member.offset, there
    return None


def own_rows(tensor: torch.Tensor, fqn: str, rank: int, task: BitwiseTask) -> torch.Tensor:
    """``tensor`` (the parameter ``fqn``, its gradient or state) without padding: the rows that torch.chunk gives this rank."""
    of = {parameter.fqn: parameter for parameter in task.parameters}
    owner = of.get(fqn) or of.get(fqn.rpartition(".")[0])
    if owner is None or task.parallel.mode == "replicate" or tuple(tensor.shape) != owner.shard_shape or not tensor.dim():
        return tensor
    rows = owner.local_shape[0] if owner.local_shape else 1
    # Without elements, only for the sizes. There may be fewer chunks than ranks: the last ranks have no rows then.
    along = "dp_shard_mod_ep" if owner.is_expert else task.mesh.data_parallel("dp_shard")
    chunks = torch.empty(rows, 0).chunk(task.mesh.degree(along))
    at = task.mesh.at(rank, along)
    return tensor[: len(chunks[at]) if at < len(chunks) else 0]
