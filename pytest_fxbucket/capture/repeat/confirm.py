"""Compares a graph that was put together with the graph that a trace of as many layers gives, in all that anyone can see."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.storage import storage_key

if TYPE_CHECKING:
    from pytest_fxbucket.capture.repeat.template import Traced


def refuse_other(made: Traced, traced: Traced) -> None:
    """Raise :class:`NotAlike` with the first thing in which ``made`` is not as ``traced``."""
    if made.inputs != traced.inputs or made.outputs != traced.outputs:
        raise NotAlike("inputs or outputs do not repeat from layer to layer")
    here, there = _Seen(made.graph_module), _Seen(traced.graph_module)
    nodes = zip(here.graph.nodes, there.graph.nodes, strict=False)
    for node, other in nodes:
        for what, of in _LOOKS.items():
            if of(here, node) != of(there, other):
                raise NotAlike(f"{other.name} has other {what} when one more layer is traced")
    if len(here.graph.nodes) != len(there.graph.nodes):
        raise NotAlike(f"one more layer gives {len(there.graph.nodes)} nodes instead of {len(here.graph.nodes)}")


class _Seen:
    """One graph, its nodes and storages by numbers."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph, self.root = graph_module.graph, graph_module
        self.numbers = {node: i for i, node in enumerate(self.graph.nodes)}
        self.storages: dict[int, int] = {}

    def arguments(self, node: fx.Node) -> object:
        return fx.map_arg((node.args, node.kwargs), lambda source: ("node", self.numbers[source]))

    def call(self, node: fx.Node) -> object:
        constant = getattr(self.root, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(constant, torch.Tensor):
            constant = constant.tolist()
        return (node.op, node.target if node.op != "placeholder" else "", constant)

    def value(self, node: fx.Node) -> object:
        return pytree.tree_map(self._tensor, [node.meta.get(key) for key in ("val", "eager_input_vals")])

    def _tensor(self, value: Any) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        storage = self.storages.setdefault(storage_key(value), len(self.storages))
        laid = (tuple(value.shape), value.stride(), value.storage_offset(), value.untyped_storage().nbytes(), storage)
        return (*laid, value.dtype, value.device, value.requires_grad, type(value))

    def meta(self, node: fx.Node) -> object:
        return {key: value for key, value in node.meta.items() if key not in ("val", "eager_input_vals")}


_LOOKS: dict[str, Callable[[_Seen, fx.Node], object]] = {
    "operators": _Seen.call,
    "arguments": _Seen.arguments,
    "metadata": _Seen.meta,
    "fake values": _Seen.value,
    "names": lambda _, node: node.name,
}
