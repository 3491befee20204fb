"""Which launches can share a bucket at all: their tensors, waits and process group; and of the others, why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_fxbucket.compat.c10d import group_ranks
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.collectives import ROWS, Collective
from pytest_fxbucket.graph.ops import operator_name

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.carried import Carried
    from pytest_fxbucket.step.roles import Direction


class Part(NamedTuple):
    """One tensor of a launch; a coalesced launch has several."""

    input: fx.Node
    waits: tuple[fx.Node, ...]
    """All waits of its result, usually one: each one's readers get the unpacked result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target(Collective):
    """One launch that an entry names and that may share a bucket."""

    launch: fx.Node
    parts: tuple[Part, ...]
    ranks: int
    """Of the group; 0 if an all-reduce runs on a group that this process does not know."""
    device: str
    dropped: tuple[fx.Node, ...]
    """What goes with the launch besides its waits: parts of a coalesced result, a buffer of its own."""
    entry: str
    fqns: tuple[str, ...]
    """Parameters that it carries, or whose gradients it reduces; in byte order."""
    place: int
    """Of the first parameter in the order of registration."""
    direction: Direction
    round: int
    """Of an all-gather: which of those of its parameter in its direction, as :attr:`Bucket.round` says."""
    level: int
    """Of a reduction: how many others its members went through before, as :attr:`Bucket.level` says; of a gather 1 if what
    it sends was gathered over its own group before."""

    @property
    def waits(self) -> list[fx.Node]:
        """All waits for it."""
        return [wait for part in self.parts for wait in part.waits]


def read(node: fx.Node, order: Order, carried: Carried) -> Target | str:
    """``node``, which carries ``carried``, as a launch that may share a bucket, or a sentence on why it may not.

    Raises :class:`PassError` if what it sends carries no fake value.
    """
    said = collectives.read_launch(node)
    assert said is not None
    if operator_name(node) not in collectives.MERGED:
        return f"{node.target} is not bucketed"
    ranks = _ranks_of(said.group) if said.kind == "all_reduce" else said.ranks
    if not isinstance(ranks, int):
        return f"its group size {ranks} is no number"
    if not isinstance(collectives.argument(node, "group_name"), str):
        return "its process group is no constant"
    if ranks == 1:
        return "its process group has one rank"
    inputs = collectives.tensors_sent(node)
    if not inputs:
        return "it sends nothing"
    bare = next((tensor for tensor in inputs if not isinstance(_value(tensor), torch.Tensor)), None)
    if bare is not None:
        raise PassError(f"{bare.name} carries no fake value (meta['val']), which merging {node.name} needs for its shape")
    parts, dropped, problem = _parts(node, inputs)
    if not problem:
        buffers, problem = _buffer(node, order)
        dropped += buffers
    problem = problem or _changed_in_flight(node, parts, order)
    if problem:
        return problem
    values = [_value(part.input) for part in parts]
    dtypes = {value.dtype for value in values}
    size = sum(hinted_numel(value) * value.dtype.itemsize for value in values)
    return Target(
        kind=said.kind,
        op=said.op,
        group=said.group,
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        bytes=size * (ranks if ROWS[said.kind].brings == "all parts" else 1),
        launch=node,
        parts=parts,
        ranks=ranks,
        device=str(values[0].device),
        dropped=dropped,
        entry=carried.entry or "",
        fqns=carried.fqns,
        place=carried.place,
        direction=carried.direction,
        round=carried.round,
        level=carried.level,
    )


def _ranks_of(group: str) -> int:
    try:
        return len(group_ranks(group))
    except KeyError:
        return 0


def hinted_numel(value: torch.Tensor) -> int:
    """Elements of ``value``; a symbolic size counts as the size that it was traced with."""
    numel = 1
    for size in value.shape:
        numel *= size if isinstance(size, int) else int(size.node.hint or 0)
    return numel


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _parts(node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[tuple[Part, ...], tuple[fx.Node, ...], str]:
    """Parts of the launch, the getitems between it and its waits, and what is wrong with them."""
    results: list[list[fx.Node]] = [[] for _ in inputs]
    dropped: list[fx.Node] = []
    coalesced = isinstance(collectives.sent_by(node), (list, tuple))
    for user in node.users:
        if not coalesced and collectives.is_wait(user):
            results[0].append(user)
        elif coalesced and user.op == "call_function" and user.target is getitem and isinstance(user.args[1], int):
            dropped.append(user)
            early = next((reader for reader in user.users if not collectives.is_wait(reader)), None)
            if early is not None:
                return (), (), f"{early.name} reads it before its wait"
            results[user.args[1]] += user.users
        else:
            return (), (), f"{user.name} reads it before its wait"
    if not all(results):
        return (), (), "nobody waits for it" if not any(results) else "nobody waits for a part of it"
    parts = tuple(Part(tensor, tuple(waits)) for tensor, waits in zip(inputs, results, strict=True))
    return parts, tuple(dropped), ""


def _buffer(node: fx.Node, order: Order) -> tuple[tuple[fx.Node, ...], str]:
    """The buffer of an ``_out`` form, if the launch alone has it; else why the launch must keep it."""
    buffer = node.kwargs.get("out")
    if not isinstance(buffer, torch.fx.Node):
        return (), ""
    other = next((user for user in buffer.users if user is not node), None)
    if other is not None:
        return (), f"its buffer {buffer.name} is read elsewhere, by {other.name}"
    if operator_name(buffer) not in ("aten::empty", "aten::new_empty", "aten::empty_like"):
        return (), f"its buffer {buffer.name} is no new one"
    return (buffer,), ""


def _changed_in_flight(node: fx.Node, parts: Sequence[Part], order: Order) -> str:
    """Whether something writes what the launch sends before its wait: then what arrives is anybody's guess."""
    begin = order.index[node]
    for part in parts:
        end = min(order.index[wait] for wait in part.waits)
        writer = next((i for i in order.writing(part.input) if begin < i < end), None)
        if writer is not None:
            return f"{order.nodes[writer].name} writes what it sends before its wait"
    return ""
