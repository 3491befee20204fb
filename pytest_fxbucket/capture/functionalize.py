"""From a graph that writes in place to the same graph of functional operators: every write becomes an edge.

Functionalization on the graph, as torch does it on tensors (``torch.func.functionalize``): a piece of memory has a value that
each write replaces; whoever reads it later, through a view or another name too, reads the value of that time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture.functional_operators import (
    FunctionalTwin,
    overlap,
    result_dtypes,
    same_place,
    twin_of,
    value_of_new,
    written_values,
)
from pytest_fxbucket.compat.fake_tensors import FakeTensor, fresh_like
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.graph.effects import effects_of, shared, written
from pytest_fxbucket.graph.ops import operator_name, overload
from pytest_fxbucket.graph.order import Order, order_of

_ATEN = torch.ops.aten


def make_functional(graph: fx.Graph, only: Collection[fx.Node] | None = None) -> dict[fx.Node, fx.Node]:
    """Replace each operator of ``graph`` that writes in place by its functional twin; gives each written input's last value.

    ``only`` are the writes that are replaced; None: all. Works on the graph itself; nodes need fake values (``meta["val"]``),
    and get them. The last values are no outputs yet: add them to the outputs, or copy them back. Raises :class:`CaptureError`
    for a write that has no functional twin, and for one to memory whose owner is not known: an attribute of the graph, two
    inputs that share memory. Nothing is recompiled.
    """
    rewriting = _Rewriting(graph, order_of(graph), only)
    if not rewriting.changing:
        return {}
    for node in list(graph.nodes):
        rewriting.visit(node)
    return rewriting.finish()


@dataclass(slots=True)
class _Memory:
    """One storage that is written somewhere."""

    owner: fx.Node
    """Who had it first; all others are names or views of it."""
    value: fx.Node
    """What it holds now, in the owner's shape."""
    version: int = 0


class _Rewriting:
    """One walk over a graph, in its order."""

    def __init__(self, graph: fx.Graph, order: Order, only: Collection[fx.Node] | None) -> None:
        # The walk keeps one memory for each storage that is written anywhere: its owner, its value now, and a version that each
        # write counts up. Nothing is done to views when a write comes. A view is made again when it is read and the version
        # that it was made of is not the latest.
        self.graph, self.order = graph, order
        self.writes = {node: args for node in order.nodes if (args := written(node)) and (only is None or node in only)}
        self.changing = {storage for args in self.writes.values() for arg in args for storage in order.storages(arg)}
        self.memories: dict[int, _Memory] = {}
        self.now: dict[fx.Node, fx.Node] = {}
        """The node that stands for a node of the old graph at this point."""
        self.seen: dict[fx.Node, tuple[int, ...]] = {}
        """Versions of the node's memories when the node that stands for it was made; older than now: it must be read again."""
        self.made_of: dict[fx.Node, tuple[Any, Any]] = {}
        """Arguments of each view as they were before any was replaced, to make the view again of a newer value."""
        self.wrote: dict[fx.Node, fx.Node] = {}
        """Results of writes that are the written argument itself, by that argument."""
        self.replaced: list[fx.Node] = []

    def visit(self, node: fx.Node) -> None:
        """Replace ``node`` if it is a write, else let it read values as they are at this point."""
        if node in self.writes:
            self._replace(node, self.writes[node])
            return
        storages = self._storages(node)
        if storages and node.op != "output" and shared(node, effects_of(node)):
            self.made_of[node] = (node.args, node.kwargs)
        if any(arg in self.seen for arg in node.all_input_nodes):
            # A list of tensors cannot be made again as a whole. Its part is taken from the list as it was, and made again by
            # itself when it is read (see ``_note``).
            read = self._read if node.target is not getitem else lambda arg: self.now.get(arg, arg)
            with self.graph.inserting_before(node):
                node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), read)
        if storages:
            self._note(node, storages)

    def finish(self) -> dict[fx.Node, fx.Node]:
        """Take out what was replaced."""
        for node in reversed(self.replaced):
            self.graph.erase_node(node)
        memories = [memory for memory in self.memories.values() if memory.version]
        return {memory.owner: memory.value for memory in memories if memory.owner.op == "placeholder"}

    def _storages(self, node: fx.Node) -> list[int]:
        return sorted(self.changing.intersection(self.order.storages(node)))

    def _versions(self, storages: list[int]) -> tuple[int, ...]:
        return tuple(self.memories[storage].version if storage in self.memories else 0 for storage in storages)

    def _note(self, node: fx.Node, storages: list[int]) -> None:
        """Note that ``node`` is there, and as the owner of each memory that has none yet. Refuses two inputs that share one."""
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        for storage in storages if is_tensor else ():
            if storage not in self.memories:
                self.memories[storage] = _Memory(node, node)
            elif node.op == "placeholder":
                first = self.memories[storage].owner
                raise CaptureError(
                    f"inputs {first.name} and {node.name} share memory, and the graph writes there; pass it once"
                )
            elif is_wait(node) and self.memories[storage].value is self.memories[storage].owner:
                self.memories[storage].value = node  # what was launched has arrived
        self.now[node] = node
        # No version is -1: a part of a list may hold an older value than that of now, so its first reader makes it again.
        self.seen[node] = (-1,) if node.target is getitem and any(self._versions(storages)) else self._versions(storages)

    def _read(self, node: fx.Node) -> fx.Node:
        """What stands for ``node`` at this point of the graph."""
        while node in self.wrote:
            node = self.wrote[node]
        if node not in self.seen:
            return node
        storages = self._storages(node)
        versions = self._versions(storages)
        if self.seen[node] != versions:
            self.now[node] = self._read_again(node, storages)
            self.seen[node] = versions
        return self.now[node]

    def _read_again(self, node: fx.Node, storages: list[int]) -> fx.Node:
        """What stands for ``node``, whose memory was written since it was last read."""
        if len(storages) == 1 and same_place(self.memories[storages[0]].owner, node):
            return self.memories[storages[0]].value
        if len(storages) != 1 or node not in self.made_of:
            raise CaptureError(f"{_called(node)} is read after parts of it were written in place; read the parts instead")
        # The view of a view is made of what stands for that view now, and so on to the owner.
        args, kwargs = fx.node.map_arg(self.made_of[node], self._read)
        again = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        again.meta = {**node.meta, "val": value_of_new(again)}
        return again

    def _replace(self, node: fx.Node, writes: list[fx.Node]) -> None:
        """Put the functional twin of ``node`` in its place."""
        op = overload(node)
        twin = twin_of(op) if op is not None else None
        # A node, a list of nodes, or None for one that is left out.
        given = written_values(op, node.args, node.kwargs) if op is not None and twin is not None else []
        targets = [list(item) if isinstance(item, (list, tuple)) else item for item in given]
        flat = [arg for target in targets for arg in (target if isinstance(target, list) else [target]) if arg is not None]
        if twin is None or set(flat) != set(writes):
            raise CaptureError(f"{_called(node)} writes {writes[0].name} in place and has no functional twin")
        self._refuse_unowned(node, flat)
        with self.graph.inserting_before(node):
            args, kwargs = fx.node.map_arg(_without(node, twin), self._read)
            meta = {key: value for key, value in node.meta.items() if key != "val"}
            order = _memory_order(flat[0].meta["val"]) if twin.op in _CONTIGUOUS else []
            if order:
                args = (self._permuted(args[0], order, meta), *args[1:])
            made = self.graph.call_function(twin.op, args, kwargs)
            made.meta = meta
            if order:
                made.meta = {**meta, "val": fresh_like(args[0].meta["val"])}
                made = self._permuted(made, [order.index(dim) for dim in range(len(order))], meta)
            # What says its dtype is not asked for it: a factory has no fake argument, so that it would really draw.
            is_known = twin.clones or kwargs.get("dtype") is not None
            dtypes = [None] * len(targets) if is_known else result_dtypes(twin.op, args, kwargs)
            self._hand_out(made, twin, targets, dtypes)
        self.replaced.append(node)
        # The operator is erased at the end: until then later nodes still name it, and ``now`` says what to read instead.
        if not effects_of(node).gives:
            return
        # It returned what it wrote, or several results that the twin returns at the same places.
        self.now[node] = made
        self.seen[node] = self._versions(self._storages(node))
        if len(targets) == 1 and isinstance(targets[0], fx.Node) and isinstance(node.meta["val"], torch.Tensor):
            self.wrote[node] = targets[0]

    def _hand_out(self, made: fx.Node, twin: FunctionalTwin, targets: list[Any], dtypes: list[Any]) -> None:
        """Give each written argument its new value. The twin returns ``twin.first`` results of its own, then the new values."""
        values: list[Any] = [None] * twin.first
        for place, target in enumerate(targets, twin.first):
            result = made if twin.results == 1 else self._part(made, place)
            dtype = dtypes[place - twin.first]
            if isinstance(target, list):
                parts = [self._part(result, i) for i in range(len(target))]
                values.append([self._write(*pair) for pair in zip(target, parts, dtype or [None] * len(target), strict=True)])
                if result is not made:
                    result.meta["val"] = values[-1]
            elif target is None:
                values.append(None)
            else:
                values.append(self._write(target, result, dtype))
        if twin.results > 1:
            made.meta["val"] = tuple(values)
        elif isinstance(targets[0], list):
            made.meta["val"] = values[0]
        if twin.first:
            own = value_of_new(made)
            made.meta["val"] = (*own[: twin.first], *values[twin.first :])

    def _part(self, of: fx.Node, place: int) -> fx.Node:
        part = self.graph.call_function(getitem, (of, place))
        part.meta = {key: value for key, value in of.meta.items() if key != "val"}
        return part

    def _write(self, target: fx.Node, result: fx.Node, dtype: torch.dtype | None) -> FakeTensor:
        """Make ``result`` the value of ``target``, cast back if the twin promoted it. Returns the fake value of ``result``."""
        old: FakeTensor = target.meta["val"]
        value = fresh_like(old)
        result.meta["val"] = value if dtype in (None, old.dtype) else value.to(dtype)
        found: FakeTensor = result.meta["val"]
        if dtype not in (None, old.dtype):
            result = self._call(_ATEN._to_copy.default, (result,), {"dtype": old.dtype}, result, value)
        (storage,) = self._storages(target)
        memory = self.memories[storage]
        # A write to all of the memory replaces its value. A write to a part of it is scattered into the value so far.
        if same_place(memory.owner, target):
            memory.value = result
        else:
            memory.value = self._into(memory, target, result)
        memory.version += 1
        self.now[target] = result
        # A part is read where it lies: the result by itself has other strides, by which torch may round otherwise.
        is_read_again = target in self.made_of and not same_place(memory.owner, target)
        self.seen[target] = (-1,) if is_read_again else (memory.version,)
        return found

    def _permuted(self, node: fx.Node, order: list[int], meta: dict[str, Any]) -> fx.Node:
        made = self.graph.call_function(_ATEN.permute.default, (node, order))
        made.meta = {**meta, "val": node.meta["val"].permute(order)}
        return made

    def _into(self, memory: _Memory, view: fx.Node, result: fx.Node) -> fx.Node:
        """The owner's value with ``result`` where ``view`` lies."""
        whole, part = memory.owner.meta["val"], view.meta["val"]
        if whole.is_complex() and part.is_contiguous() and part.shape == (*whole.shape, 2):  # both halves of each element
            return self._call(_ATEN.view_as_complex.default, (result,), {}, result, fresh_like(whole))
        if whole.storage_offset() or not whole.is_contiguous() or part.dtype != whole.dtype:
            raise CaptureError(
                f"a view of {memory.owner.name}, {view.name}, is written in place; only views of contiguous tensors that begin "
                "their memory, of the same dtype, can be"
            )
        where = (part.size(), part.stride(), part.storage_offset())
        args = (memory.value, result, *(list(item) if isinstance(item, tuple) else item for item in where))
        return self._call(_ATEN.as_strided_scatter.default, args, {}, result, fresh_like(whole))

    def _call(self, op: Any, args: Any, kwargs: Any, like: fx.Node, value: FakeTensor) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        node.meta = {**like.meta, "val": value}
        return node

    def _refuse_unowned(self, node: fx.Node, targets: list[fx.Node]) -> None:
        met: dict[int, list[fx.Node]] = {}
        for target in targets:
            storages = self._storages(target)
            if len(storages) != 1 or not isinstance(target.meta.get("val"), torch.Tensor):
                raise CaptureError(f"{_called(node)} writes {target.name}, which is not one tensor; write its parts one by one")
            owner = self.memories[storages[0]].owner
            if owner.op == "get_attr":
                raise CaptureError(
                    f"{_called(node)} writes {owner.target}, a tensor that the graph holds; make it an input of the graph"
                )
            others = met.setdefault(storages[0], [])
            if twice := next((other for other in others if overlap(other, target)), None):
                raise CaptureError(f"{_called(node)} writes the memory that {twice.name} and {target.name} share twice")
            others.append(target)


_CONTIGUOUS = frozenset({_ATEN.bernoulli.p})
"""Twins whose results lie contiguous whatever their inputs' strides are, and which draw in the order of memory."""


def _memory_order(value: torch.Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost; empty if they lie so already."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return [] if order == list(range(value.dim())) else order


def _without(node: fx.Node, twin: FunctionalTwin) -> tuple[Any, Any]:
    """Arguments of ``node`` without those that only say where to write, and with defaults that the twin does not have."""
    dropped = {name for _, name in twin.dropped}
    places = {place for place, _ in twin.dropped}
    args = tuple(arg for i, arg in enumerate(node.args) if i not in places)
    kwargs = {name: arg for name, arg in node.kwargs.items() if name not in dropped}
    target: Any = node.target
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    needed = [a.name for a in twin.op._schema.arguments[len(args) :] if not a.has_default_value()]  # bernoulli_ has p = 0.5
    own = {a.name for a in target._schema.arguments}
    for name in (a.name for a in twin.op._schema.arguments if dropped and a.name in ("dtype", "device") and a.name not in own):
        out: Any = node.kwargs[twin.dropped[0][1]]
        kwargs[name] = getattr(out.meta["val"], name)
    return args, {**{name: defaults[name] for name in needed if name not in kwargs and name in defaults}, **kwargs}


def _called(node: fx.Node) -> str:
    return f"{node.target} ({node.name})"


_GRADIENTS = 1
"""Place of the gradients, among arguments as among results."""


def without_passing_through(graph: fx.Graph) -> None:
    """Let readers of the gradients that a fused update returns read the gradients that it was given.

    By its schema it writes gradients, but it does so only to unscale them: without ``grad_scale`` they stay as they were.
    """
    for node in list(graph.nodes):
        if operator_name(node).startswith("aten::_fused_") and node.kwargs.get("grad_scale") is None:
            given = node.args[_GRADIENTS]
            parts = [part for part in node.users if part.target is getitem and part.args[1] == _GRADIENTS]
            for item in (item for part in parts for item in list(part.users) if item.target is getitem):
                if isinstance(given, (list, tuple)) and isinstance(item.args[1], int):
                    item.replace_all_uses_with(given[item.args[1]])
