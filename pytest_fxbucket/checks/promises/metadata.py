"""Does what a graph's nodes say of themselves hold? Compilers go by it, and readers; our checks believe none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.passes.new_nodes import value_of
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from torch import fx


def metadata_problems(before: fx.Graph, after: fx.Graph) -> list[str]:
    """A sentence for each kind of thing that nodes of ``after``, made of ``before``, say wrongly.

    A node that was there before says what it said; of a new one the shape and dtype of ``meta["val"]`` are what its operator
    gives for those of its inputs. What a node does not say is no problem.
    """
    known = {(node.name, node.target): node for node in before.nodes}
    kept = [(known[node.name, node.target], node) for node in after.nodes if (node.name, node.target) in known]
    new = [node for node in after.nodes if node.op == "call_function" and (node.name, node.target) not in known]
    said = {"module": _other(kept, module_of), "direction": _other(kept, _backward)}
    said['meta["val"]'] = [*_other(kept, _value), *_wrong_values(new)]
    return [line for what, lines in said.items() for line in _told(what, lines)]


def _other(kept: list[tuple[fx.Node, fx.Node]], said: Callable[[fx.Node], str]) -> list[str]:
    pairs = ((node, said(old), said(node)) for old, node in kept)
    return [f"{node.name} says {now}, and {was or 'nothing'} before" for node, was, now in pairs if now and was != now]


def _backward(node: fx.Node) -> str:
    """Of the two directions the one that has marks."""
    return "backward" if direction_of(node) == "backward" else ""


def _wrong_values(new: list[fx.Node]) -> Iterator[str]:
    for node in new:
        said, given = _value(node), _given(node)
        if said and given and said != given:
            yield f"{node.name} says {said}, and {node.target} gives {given}"


def _value(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def _given(node: fx.Node) -> str:
    """What the operator gives for what its inputs say; empty if it cannot be called on that."""
    inputs = [one.meta.get("val") for one in node.all_input_nodes]
    first = next((value for value in inputs if isinstance(value, FakeTensor)), None)
    if first is None or any(value is None for value in inputs):
        return ""
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda one: one.meta["val"])
    try:
        value = value_of(first.fake_mode, node.target, args, kwargs)
    except PassError:
        return ""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def _told(what: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = f" (and {counted(len(lines) - 1, 'other node')})" if lines[1:] else ""
    return [f"what nodes say of their {what} is wrong, which compilers and readers go by: {lines[0]}{more}"]
