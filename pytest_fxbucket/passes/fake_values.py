"""Compares what nodes say that they give, ``meta["val"]``, with what their operators give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.passes.new_nodes import value_of

if TYPE_CHECKING:
    from torch import fx


def wrong_values(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """A sentence for each of ``nodes`` whose value is not what its operator gives for the values of its inputs.

    ``nodes`` are in the order of their graph. If a node carries no value, its readers are given what its operator gives.
    """
    for node, name, said, now in said_and_given(nodes):
        if said and now and said != now:
            yield f"{name} says {said}, and {node.target} gives {now}"


def said_and_given(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, str, str, str]]:
    """Each of ``nodes`` that carries a value, its name, its value, and what the operator gives; empty where that is not known.

    Each item of a list is one of these, by the name ``NODE[2]``.
    """
    unsaid: dict[fx.Node, Any] = {}
    for node in nodes:
        given = _fake_result(node, unsaid)
        if "val" in node.meta:
            yield from ((node, *one) for one in _by_item(node.name, node.meta["val"], given))
        else:
            unsaid[node] = given


def value_text(value: Any) -> str:
    """Dtype and shape, and strides and device that are not as ever; of a list those of each tensor; empty if there is none."""
    if isinstance(value, torch.Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device.type}"
        return f"{value.dtype} {tuple(value.shape)}{_strides(value)}{device}"
    if isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "a number"
    texts = [value_text(one) for one in value] if isinstance(value, (list, tuple)) else []
    return f"[{', '.join(texts)}]" if any(texts) else ""


def _strides(value: torch.Tensor) -> str:
    """In words if memory is not contiguous; those of a dimension of one element say nothing."""
    if value.layout != torch.strided or not all(isinstance(one, int) for one in (*value.shape, *value.stride())):
        return ""
    if value.is_contiguous():
        return ""
    strides = [stride if size != 1 else 1 for size, stride in zip(value.shape, value.stride(), strict=True)]
    return f" of strides ({', '.join(map(str, strides))})"


def fill_in(graph: fx.Graph, before: fx.Graph | None = None) -> None:
    """Give each call of ``graph`` without a value what its operator gives for those of its inputs, as far as these tell.

    Inputs without one have those of the graph ``before``.
    """
    inputs = graph.find_nodes(op="placeholder")
    for node, old in zip(inputs, before.find_nodes(op="placeholder") if before is not None else (), strict=False):
        if "val" not in node.meta and "val" in old.meta:
            node.meta["val"] = old.meta["val"]
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and (value := _fake_result(node, {}, mode)) is not None:
            node.meta["val"] = value


def _by_item(name: str, said: Any, given: Any) -> Iterator[tuple[str, str, str]]:
    both = isinstance(said, (list, tuple)) and isinstance(given, (list, tuple)) and len(said) == len(given)
    if not both:
        yield name, value_text(said), value_text(given)
        return
    for number, pair in enumerate(zip(said, given, strict=True)):
        yield from _by_item(f"{name}[{number}]", *pair)


def _fake_result(node: fx.Node, unsaid: Mapping[fx.Node, Any], mode: FakeTensorMode | None = None) -> Any:
    """What the operator gives for what its inputs say; None if it cannot be called on that. ``mode`` is for one without any."""
    inputs = {one: one.meta.get("val", unsaid.get(one)) for one in node.all_input_nodes}
    mode = next((value.fake_mode for value in _flat(list(inputs.values())) if isinstance(value, FakeTensor)), mode)
    if mode is None or any(value is None for value in inputs.values()):
        return None
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda one: inputs[one])
    try:
        return value_of(mode, node.target, args, kwargs)
    except PassError:
        return None


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
