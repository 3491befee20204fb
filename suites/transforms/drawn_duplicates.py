"""Random legal graphs in which values are launched again and again: as they are, behind chains, and across writes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.fuzz import collective_steps, compute_steps
from pytest_fxbucket.fuzz.drawing import Drawing, DrawingStep, ReadableValue
from pytest_fxbucket.fuzz.program import aten

_FUNCTIONAL = ("gather", "reduce", "all_reduce")
_ANY = (*_FUNCTIONAL, "coalesced", "gather_into", "all_reduce_in_place", "wait_again")
_OTHERS = ("compute", "view", "write", "cast", "random", "give", "backward", "wait", "cast_and_launch")


@dataclass(frozen=True)
class _Launched:
    """What was launched before, to do it again."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sent: ReadableValue
    plain: bool


def drawn_duplicates(number: int, world: int, functional: bool) -> Drawing:
    """The program of the seed ``number``, not finished; ``functional``: of launches that write nothing."""
    draw = random.Random(number)
    drawing = Drawing(world)
    drawing.groups = ["0", "0", "again"]
    steps = {**compute_steps.STEPS, **collective_steps.STEPS}
    launched: list[_Launched] = []
    for _ in range(draw.randint(8, 30)):
        if launched and draw.random() < 0.45:
            _launch_again(drawing, draw, draw.choice(launched[-4:]))
            continue
        kinds = _FUNCTIONAL if functional else _ANY
        name = draw.choice(kinds if draw.random() < 0.45 else _OTHERS)
        known = {one.node for one in drawing.open}
        values = {value.node: value for value in drawing.values}
        steps[name][0](drawing, DrawingStep(name, *(draw.randint(0, 11) for _ in range(3))))
        launched += _new(drawing, values, known)
    return drawing


def _new(drawing: Drawing, values: dict[fx.Node, ReadableValue], known: set[fx.Node]) -> list[_Launched]:
    """Launches of one tensor that the last step made."""
    found = []
    for node in drawing.program.graph.nodes:
        if node in known or not str(node.target).startswith("_c10d_functional.") or "wait" in str(node.target):
            continue
        sent = node.args[0]
        if isinstance(sent, fx.Node) and sent in values and not node.kwargs and not node.target._schema.is_mutable:
            found.append(_Launched(node.target, node.args[1:], {}, values[sent], values[sent].plain))
    return found[-1:]


def _launch_again(drawing: Drawing, draw: random.Random, one: _Launched) -> None:
    """Behind nothing, or a chain that keeps the elements; often waited for at once."""
    if one.sent not in drawing.readable():
        return
    node, storage, shape = one.sent.node, one.sent.storage, list(one.sent.fake.shape)
    for way in draw.choices(("detach", "clone", "view", "cast"), k=draw.randint(0, 2)):
        if way == "detach":
            node = drawing.call(aten.detach.default, node)
        elif way == "clone":
            node, storage = drawing.call(aten.clone.default, node, memory_format=torch.contiguous_format), drawing.new_storage()
        elif way == "view" and node.meta["val"].is_contiguous():
            node = drawing.call(aten.view.default, drawing.call(aten.view.default, node, [-1]), shape)
        elif way == "cast":
            node, storage = drawing.call(aten._to_copy.default, node, dtype=one.sent.fake.dtype), drawing.new_storage()
    made = drawing.call(one.target, node, *one.args)
    drawing.fly([made], [ReadableValue(node, storage, one.plain)], one.plain)
    if draw.random() < 0.6:
        drawing.wait(draw.randint(0, 1))
