"""Compares what nodes say that they give, ``meta["val"]``, with what their operators give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.passes.new_nodes import value_of

if TYPE_CHECKING:
    from torch import fx


def wrong_values(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """A sentence for each of ``nodes`` whose value is not what its operator gives for the values of its inputs.

    ``nodes`` are in the order of their graph. If a node carries no value, its readers are given what its operator gives.
    """
    unsaid: dict[fx.Node, Any] = {}
    for node in nodes:
        given = _fake_result(node, unsaid)
        if "val" not in node.meta:
            unsaid[node] = given
        elif (said := value_text(node.meta["val"])) and (now := value_text(given)) and said != now:
            yield f"{node.name} says {said}, and {node.target} gives {now}"


def value_text(value: Any) -> str:
    """Dtype and shape; empty if it is no tensor."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def _fake_result(node: fx.Node, unsaid: Mapping[fx.Node, Any]) -> Any:
    """What the operator gives for what its inputs say; None if it cannot be called on that."""
    inputs = {one: one.meta.get("val", unsaid.get(one)) for one in node.all_input_nodes}
    mode = next((value.fake_mode for value in inputs.values() if isinstance(value, FakeTensor)), None)
    if mode is None or any(value is None for value in inputs.values()):
        return None
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda one: inputs[one])
    try:
        return value_of(mode, node.target, args, kwargs)
    except PassError:
        return None
