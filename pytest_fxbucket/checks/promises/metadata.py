"""Does what a graph's nodes say of themselves hold? Compilers go by it, and readers; our checks believe none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.passes.fake_values import value_text, wrong_values
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
    said['meta["val"]'] = [*_other(kept, _value), *wrong_values(new)]
    return [line for what, lines in said.items() for line in _told(what, lines)]


def _other(kept: list[tuple[fx.Node, fx.Node]], said: Callable[[fx.Node], str]) -> list[str]:
    pairs = ((node, said(old), said(node)) for old, node in kept)
    return [f"{node.name} says {now}, and {was or 'nothing'} before" for node, was, now in pairs if now and was != now]


def _backward(node: fx.Node) -> str:
    """Of the two directions the one that has marks."""
    return "backward" if direction_of(node) == "backward" else ""


def _value(node: fx.Node) -> str:
    return value_text(node.meta.get("val"))


def _told(what: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = f" (and {counted(len(lines) - 1, 'other node')})" if lines[1:] else ""
    return [f"what nodes say of their {what} is wrong, which compilers and readers go by: {lines[0]}{more}"]
