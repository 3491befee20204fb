"""Numbers for what nodes hold: equal numbers, equal elements in equal order, down to the bit.

Shape, dtype and place in memory are told as text: symbolic sizes cannot be compared for certain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from operator import getitem
from typing import Any, TypeGuard

import torch
from torch import fx

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of, written
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import by_operator, operator_name, overload
from pytest_fxbucket.graph.order import Order
from pytest_fxbucket.graph.walks import walked
from pytest_fxbucket.transforms.merge_duplicates.mergeable import GraphWrites


def form_of(node: fx.Node) -> Hashable:
    """Shape, dtype, device and strides of each tensor that ``node`` gives; for a number, its type."""
    value = node.meta.get("val")
    forms = [
        (str(tuple(one.shape)), str(one.dtype), str(one.device), str(tuple(one.stride()) if _is_strided(one) else one.layout))
        for one in collectives.tensors(value)
    ]
    return tuple(forms) or type(value).__name__


def _is_strided(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def dtype_of(node: fx.Node) -> Hashable:
    """dtype and device of the tensor that ``node`` gives; its type if it gives anything else."""
    value = node.meta.get("val")
    return f"{value.dtype} {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__


def place_of(node: fx.Node) -> Hashable:
    """:func:`form_of`, and the storage offset of the tensor that ``node`` gives."""
    value = node.meta.get("val")
    return form_of(node), str(value.storage_offset()) if _is_strided(value) else ""


# Value numbering (J. Cocke, J. T. Schwartz, 1970): one walk in graph order gives each node a number, and equal keys (operator,
# numbers of the inputs, other arguments) give equal numbers. Only nodes that move data, cast it or compute it element by
# element are keyed; any other node has a number of its own. An operator that only shows the same elements in another shape has
# the number of its input. Memory that was written since it was made has a number of its own.


_SAME = frozenset(
    f"aten::{name}"
    for name in (
        *("detach", "alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "view", "_unsafe_view", "reshape"),
        *("flatten", "squeeze", "unsqueeze", "view_as"),
    )
)
"""Operators whose result has the elements of their first argument in the same order."""
_CASTS = frozenset({"aten::_to_copy", "aten::to", "prims::convert_element_type"})
_ANYTHING = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty"})
"""Operators whose result holds arbitrary elements, so two calls are never equal."""
_BY_MEMORY = ("aten::as_strided", "aten::_reshape_alias", "inductor::")
"""Beginnings of the names of operators that read the storage under their first argument instead of its elements."""
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("detach", "alias", "view", "_unsafe_view", "slice", "select", "t", "transpose", "permute", "squeeze", "unsqueeze"),
        "narrow",
    )
)
"""Operators whose result always lies in the memory of their first argument."""
_is_pointwise = by_operator(lambda op: torch.Tag.pointwise in op.tags, False)


class ValueNumbers:
    """Numbers of the values that a graph's launches send, and of the nodes that those values are made of."""

    def __init__(self, order: Order, writes: GraphWrites | None = None, regardless: ValueNumbers | None = None) -> None:
        """Number the values of ``order``. With ``writes``, a value that was written since has another number.

        ``regardless`` is then the numbering of the same order without ``writes``.
        """
        self._order, self._writes, self._regardless = order, writes, regardless
        self._numbers: dict[Hashable, int] = {}
        self._made: dict[fx.Node, int] = {}
        needed = _needed(order.nodes)
        for index, node in enumerate(order.nodes):
            if node in needed or collectives.launch_kind(node) is not None:
                self._made[node] = self._number_of(node, index)

    def read(self, node: fx.Node, at: int) -> int:
        """Number of the elements that a reader at the place ``at`` finds in the result of ``node``."""
        last = self._writes.last(node, self._order.index[node], at) if self._writes is not None else None
        if last is None or self._regardless is None:
            return self._made[node]
        # Two names of one piece of memory hold the same, whatever was written there: views of one node by the same way. Equal
        # storages of fake values would not do, as nodes that were copied share them.
        same, root = self._regardless._made[node], self._order.index[_root(node)]
        return self._number(("written", same, root, last))

    def sent(self, launch: fx.Node) -> int:
        """Number of ``launch``: equal for launches that bring the same on every rank."""
        return self._made[launch]

    def last_writes(self, launch: fx.Node) -> set[int]:
        """Places of the last writes to what ``launch`` sends, and to each value that it is made of, before that was read."""
        assert self._writes is not None
        place = self._order.index

        def read_by(node: fx.Node) -> list[tuple[fx.Node, int]]:
            return [(source, place[node]) for source in inputs_of(node)]

        read = walked(read_by(launch), lambda pair: read_by(pair[0]) if _is_followed(pair[0]) else ())
        lasts = (self._writes.last(node, -1 if node.op == "get_attr" else place[node], at) for node, at in read)
        return {last for last in lasts if last is not None}

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _number_of(self, node: fx.Node, index: int) -> int:
        if node.op == "get_attr":
            # Every get_attr of one name gives the same tensor, which lives from the start: writes before this node count too.
            last = self._writes.last(node, -1, index) if self._writes is not None else None
            return self._number(("attribute", str(node.target), last))
        if not _is_followed(node):
            return self._number(("node", index))
        name, first = operator_name(node), next(iter(node.all_input_nodes), None)
        if first is not None and collectives.is_wait(node):
            return self.read(first, index)
        before, after = first.meta.get("val") if first is not None else None, node.meta.get("val")
        # A view, or a cast to the dtype that the tensor has already, changes no element: it has its input's number.
        if first is not None and isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            if name in _SAME or (name in _CASTS and (before.dtype, before.device) == (after.dtype, after.device)):
                return self.read(first, index)
            if name in _CASTS and before.device == after.device:
                return self._number(("cast", self.read(first, index), str(before.dtype), str(after.dtype)))
        is_launch = collectives.launch_kind(node) is not None
        said = tuple(self._key_of(value, index, is_launch) for value in _arguments(node))
        place = (place_of(first), self._order.storages(first)) if first is not None and name.startswith(_BY_MEMORY) else None
        return self._number((id(node.target), said, place))

    def _key_of(self, value: Any, at: int, is_launch: bool) -> Hashable:
        """An argument as part of a key. For what a launch sends, the shape is left out; a group's twin counts as the group."""
        if isinstance(value, torch.fx.Node):
            return ("node", self.read(value, at), dtype_of(value) if is_launch else form_of(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._key_of(item, at, is_launch) for item in value)
        said = untwinned(value) if is_launch and isinstance(value, str) else value
        return type(said).__name__, repr(said)


def _needed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that launches are made of, as far back as values are followed: only these need numbers."""
    found: set[fx.Node] = set()
    # From the last to the first, so that all readers of a node were met before it.
    for node in reversed(tuple(nodes)):
        if collectives.launch_kind(node) is not None or (node in found and _is_followed(node)):
            found.update(inputs_of(node))
    return found


def _is_followed(node: fx.Node) -> bool:
    """Whether the result of ``node`` follows from its arguments alone."""
    if node.op != "call_function":
        return False
    does = effects_of(node)
    if written(node) or does.everything or does.random or does.chained or does.barrier:
        return False
    if collectives.is_wait(node) or collectives.launch_kind(node) is not None:
        return True
    if overload(node) is None and node.target is not getitem:
        return not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple, type(None)))  # arithmetic on sizes
    is_size = isinstance(node.meta.get("val"), (torch.SymInt, int))
    return is_size or (moves_data(node) and operator_name(node) not in _ANYTHING) or _is_pointwise(node)


def _arguments(node: fx.Node) -> list[Any]:
    """All arguments, those left out by their defaults; for a Python function, which has no schema, those that are given."""
    op = overload(node)
    if op is None:
        return [*node.args, *sorted(node.kwargs.items())]
    return [collectives.argument(node, argument.name) for argument in op._schema.arguments]


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` is a view of, as far as only operators that always give views stand in between."""
    while operator_name(node) in _VIEWS:
        node = node.all_input_nodes[0]
    return node
