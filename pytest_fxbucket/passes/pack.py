"""Builds one merged launch out of several: pack, launch, wait, unpack. The same nodes on every rank.

All-gather: the members' shards one behind the other (``flatten_dense_tensors``); what arrives is a matrix of shape
(ranks, elements of a rank) whose columns are cut into members. Reduce-scatter: the members' gradients, each seen as a matrix of
shape (ranks, elements of its piece), side by side (``_chunk_cat``, which pads an uneven dimension 0 with zeros); the piece that
arrives is cut into members. Neither needs to know the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any, cast

import torch

from pytest_fxbucket.compat.collectives import c10d_functional
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.moves import hoist, put_before, readers_before
from pytest_fxbucket.passes.targets import Target

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, slots=True)
class Merged:
    """A bucket in the graph: one launch, one wait, and the members in byte order."""

    launch: fx.Node
    wait: fx.Node
    members: tuple[Target, ...]

    @property
    def first(self) -> Target:
        """Any member: they agree in entry, direction, kind, group, op and dtype."""
        return self.members[0]


def merge(graph: fx.Graph, members: Sequence[Target]) -> Merged:
    """Merge ``members``, given in byte order, into one launch; a single member stays as it is.

    Raises :class:`PassError` if the members depend on each other, differ in what the plan does not say, or would change.
    """
    if len(members) == 1:
        return Merged(members[0].launch, members[0].wait, tuple(members))
    builder = _Builder(graph, members)
    return builder.all_gather() if members[0].kind == "all_gather" else builder.reduce_scatter()


class _Builder:
    def __init__(self, graph: fx.Graph, members: Sequence[Target]) -> None:
        self.graph, self.members = graph, tuple(members)
        self.meta = _shared_meta(members)
        self.inputs = [cast("fx.Node", collectives.argument(member.launch, "input")) for member in members]
        self.aten, self.c10d = torch.ops.aten, c10d_functional()
        ranks = collectives.argument(members[0].launch, "group_size")
        for member in members:
            size = collectives.argument(member.launch, "group_size")
            if not isinstance(size, int) or size != ranks:
                raise PassError(
                    f"{member.launch.name} has group size {size}, so it cannot join {members[0].launch.name}'s {ranks}"
                )
        self.ranks = cast("int", ranks)

    def all_gather(self) -> Merged:
        first = min(member.launch for member in self.members)
        first_wait = min(member.wait for member in self.members)
        hoist([node for node in self.inputs if node.op != "placeholder"], first)
        shapes = [_value(node).shape for node in self.inputs]
        with self.graph.inserting_before(first):
            packed = self._call(self.aten.flatten_dense_tensors.default, list(self.inputs))
            launch = self._call(self.c10d.all_gather_into_tensor.default, packed, self.ranks, self.members[0].group)
        with self.graph.inserting_before(first_wait):
            wait = self._call(self.c10d.wait_tensor.default, launch)
            rows = self._call(self.aten.view.default, wait, [self.ranks, -1])
            sizes = [shape.numel() for shape in shapes]
            pieces = self._call(self.aten.split_with_sizes_copy.default, rows, sizes, 1)
            results = []
            for i, shape in enumerate(shapes):
                piece = self._call(getitem, pieces, i)
                results.append(self._view(piece, [shape[0] * self.ranks, *shape[1:]], self.members[i]))
        self._replace_members(results)
        return Merged(launch, wait, self.members)

    def reduce_scatter(self) -> Merged:
        last = max(member.launch for member in self.members)
        self._refuse_dependence(last)
        shapes = [_value(node).shape for node in self.inputs]
        with self.graph.inserting_before(last):
            packed = self._call(self.aten._chunk_cat.default, list(self.inputs), 0, self.ranks)
            launch = self._call(
                self.c10d.reduce_scatter_tensor.default, packed, self.members[0].op, self.ranks, self.members[0].group
            )
            wait = self._call(self.c10d.wait_tensor.default, launch)
            flat = self._call(self.aten.view.default, wait, [-1])
            sizes = [shape.numel() // self.ranks for shape in shapes]
            pieces = self._call(self.aten.split_with_sizes.default, flat, sizes)
            results = []
            for i, shape in enumerate(shapes):
                piece = self._call(getitem, pieces, i)
                results.append(self._view(piece, [shape[0] // self.ranks, *shape[1:]], self.members[i]))
        for member in self.members:
            put_before(readers_before(member.wait, last)[1:], last)
        self._replace_members(results)
        return Merged(launch, wait, self.members)

    def _refuse_dependence(self, last: fx.Node) -> None:
        """No member may need another member's result."""
        for member in self.members:
            readers = readers_before(member.wait, last)
            blocked = [n for n in readers[1:] if collectives.launch_kind(n)]
            if blocked or not set(readers).isdisjoint(last.all_input_nodes):
                name = blocked[0].name if blocked else last.name
                raise PassError(
                    f"entry {member.entry!r}: the {member.kind} of {member.fqn} cannot join its bucket, "
                    f"because {name} depends on its result"
                )

    def _replace_members(self, results: Sequence[fx.Node]) -> None:
        """Only now, since a node that is an insertion point must not be erased."""
        for member, result in zip(self.members, results, strict=True):
            member.wait.replace_all_uses_with(result)
            self.graph.erase_node(member.wait)
            self.graph.erase_node(member.launch)

    def _view(self, piece: fx.Node, shape: Sequence[int], member: Target) -> fx.Node:
        """``piece`` in the member's shape; its fake value is that of the wait it replaces, which is gone after."""
        node = self.graph.call_function(self.aten.view.default, (piece, list(shape)))
        node.meta = {**self.meta, "val": member.wait.meta.get("val")}
        return node

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = dict(self.meta)
        node.meta["val"] = _result(target, args)
        return node


def _shared_meta(members: Sequence[Target]) -> dict[str, Any]:
    """Metadata of a merged node: the entry and its sources, and nothing of one member alone."""
    first = members[0]
    meta: dict[str, Any] = {
        "fxbucket_entry": first.entry,
        "fxbucket_sources": tuple(member.fqn for member in members),
    }
    if first.direction == "backward":
        meta["autograd_backward"] = True
    return meta


def _value(node: Any) -> torch.Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise PassError(f"{node.name} carries no fake value (meta['val']), which merging needs for shapes")
    if not all(isinstance(size, int) for size in value.shape):
        raise PassError(f"{node.name} has the symbolic shape {tuple(value.shape)}, and merging needs numbers")
    return value


def _result(target: Any, args: tuple[Any, ...]) -> Any:
    """Fake value of the call: the operator itself, run under the arguments' fake mode."""
    from pytest_fxbucket.compat.pytree import tree_leaves, tree_map

    values = tree_map(lambda a: a.meta["val"] if isinstance(a, torch.fx.Node) else a, args)
    mode = next((leaf.fake_mode for leaf in tree_leaves(values) if hasattr(leaf, "fake_mode")), None)
    if mode is None:
        raise PassError("the graph's values (meta['val']) are not fake tensors, which merging needs")
    try:
        with mode:
            return target(*values)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise PassError(f"{target} cannot be called on what the launches carry: {type(error).__name__}: {reason}") from error
