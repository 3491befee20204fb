"""Steps of a whole training step: parameters that are gathered and used, gradients that are reduced, updates.

What a list of steps leaves out is done at its end, so that any list with a parameter is a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx

from pytest_fxbucket.fuzz.drawing import Drawing, DrawingStep, DrawnParameter, ReadableValue, pick
from pytest_fxbucket.fuzz.program import COLUMNS, HALVES, MODULES, aten, with_role

BESIDE = ("all_reduce", "all_to_all", "wait")
"""Those steps of collective_steps that a training step may have besides its own."""
FIRST = ("parameter",)
"""A program with one of these steps is a training step."""
_BUFFERS = ("p5", "p7")
"""Inputs that each call of a whole step is given as the one before left them."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float32)
_READ = 6
"""One gradient in so many is read by what follows, one parameter in half as many is read or written."""
_FORMS = ("hybrid", "sharded", "replicated", "sharded")


def parameter(drawing: Drawing, step: DrawingStep) -> None:
    """A parameter with its state, gathered and used."""
    made = drawing.program
    module = MODULES[step.a % len(MODULES)]
    made.module, backward = f"{drawing.inside}{module}", made.backward
    made.backward = False
    number = sum(one.fqn.startswith(f"{module}.") for one in drawing.drawn_parameters)
    fqn, name = f"{module}.w{number}", f"{module}_w{number}"
    shape = ((2, 1, 4)[step.b % 3], COLUMNS)
    shard = made.given(name, *shape, role=f"param {fqn}")
    momentum = made.given(f"{name}_momentum", *shape, role=f"state {fqn}.momentum")
    gathered, reduced = _parted(drawing, shard, pick(_FORMS, step.b), pick(_DTYPES, step.c))
    drawing.modules.append(made.module)
    drawing.drawn_parameters.append(DrawnParameter(fqn, made.module, shard, gathered, momentum, reduced))
    _used(drawing, gathered, step.b)
    if step.c % (_READ // 2) == 1:
        drawing.add(shard, plain=True)
    made.backward = backward


def _parted(drawing: Drawing, shard: fx.Node, form: str, dtype: torch.dtype) -> tuple[fx.Node, Callable[[fx.Node], fx.Node]]:
    """The tensor to compute with, and the function that reduces its gradient."""
    made = drawing.program
    sent = shard if dtype == torch.float32 else made.call(aten._to_copy.default, shard, dtype=dtype)

    def summed(gradient: fx.Node, *launches: Callable[[fx.Node], fx.Node]) -> fx.Node:
        found = gradient if dtype == torch.float32 else made.call(aten._to_copy.default, gradient, dtype=torch.float32)
        for launch in launches:
            drawing.modules.append(made.module or "")
            found = launch(found)
        return found

    if form == "replicated":
        return sent, lambda gradient: summed(gradient, partial(made.all_reduce, op="avg"))
    if form == "hybrid" and drawing.world in HALVES:
        steps = partial(made.reduce, op="avg", group="halves"), partial(made.all_reduce, op="sum", group="strided")
        return made.gather(sent, "halves"), lambda gradient: summed(gradient, *steps)
    return made.gather(sent), lambda gradient: summed(gradient, partial(made.reduce, op="avg"))


def _used(drawing: Drawing, whole: fx.Node, number: int) -> fx.Node:
    """An activation or the gradient of one, times ``whole``: small numbers, and seldom 0."""
    product = drawing.call(aten.mul.Tensor, _activation(drawing, number), _row(drawing, whole))
    product = drawing.call(aten.remainder.Scalar, drawing.call(aten.add.Tensor, product, 1), 7)
    return drawing.add(product).node


def _activation(drawing: Drawing, number: int) -> ReadableValue:
    # Two of the inputs have this shape, so there always is one.
    shape = (2 * drawing.world, COLUMNS)
    found: ReadableValue = pick(drawing.readable(lambda v: v.fake.shape == shape and v.fake.dtype == torch.float32), number)
    return found


def _row(drawing: Drawing, node: fx.Node) -> fx.Node:
    return drawing.call(aten.sum.dim_IntList, node, [0])


def gradient(drawing: Drawing, step: DrawingStep) -> None:
    """The gradient of a parameter that has none yet: made of its gathered value and an activation, then reduced."""
    one: DrawnParameter | None = pick([one for one in drawing.drawn_parameters if one.gradient is None], step.a)
    if one is None:
        return
    made = drawing.program
    before = made.module, made.backward
    made.module, made.backward = one.module, True
    whole = one.gathered
    own = drawing.call(aten.mul.Tensor, whole, _row(drawing, _activation(drawing, step.b).node))
    own = drawing.call(aten.remainder.Scalar, own, 7)
    if step.c % 3 == 2:  # used twice
        own = drawing.call(aten.add.Tensor, own, whole)
    one.gradient = one.reduced(own)
    _used(drawing, whole, step.b)
    made.module, made.backward = before
    if step.c % 4 < 3:
        drawing.results.append((one.gradient, f"grad {one.fqn}"))
    if step.b % _READ == 1:
        drawing.add(one.gradient)


def update(drawing: Drawing, step: DrawingStep) -> None:
    """The update of one parameter that has a gradient, or of several, of one module or of all."""
    ready = [one for one in drawing.drawn_parameters if one.gradient is not None and not one.updated]
    if not ready:
        return
    first: DrawnParameter = pick(ready, step.a)
    alike = [one for one in ready if one.module == first.module or step.c % 4 == 3]
    group = alike if step.c % 2 else [first]
    made = drawing.program
    before = made.module, made.backward
    made.module, made.backward = None, False
    UPDATES[step.b % len(UPDATES)](drawing, group, _rate(drawing, step.a % 2))
    for one in group:
        one.updated = True
    made.module, made.backward = before


def _rate(drawing: Drawing, number: int) -> fx.Node:
    """A learning rate of its own for every other update."""
    name = f"lr{number}"
    given: dict[str, fx.Node] = {node.name: node for node in drawing.program.graph.find_nodes(op="placeholder")}
    return given.get(name) or drawing.program.given(name, role=f"hyper optimizers.0.groups.{number}.lr")


def _gives(drawing: Drawing, one: DrawnParameter, new: fx.Node, momentum: fx.Node) -> None:
    drawing.results += [(new, f"param {one.fqn}"), (momentum, f"state {one.fqn}.momentum")]


def _rounded(drawing: Drawing, group: Sequence[DrawnParameter], rate: fx.Node) -> None:
    """An update rounded at random: 0 or 1 is added by chance."""
    for one in group:
        new = drawing.call(aten.sub.Tensor, one.shard, drawing.call(aten.mul.Tensor, one.gradient, rate))
        new = drawing.call(aten.add.Tensor, new, drawing.call(aten.randint_like.default, one.gradient, 2))
        _gives(drawing, one, new, drawing.call(aten.neg.default, one.momentum))


def _plain(drawing: Drawing, group: Sequence[DrawnParameter], rate: fx.Node) -> None:
    """SGD with momentum, one parameter after the other."""
    for one in group:
        momentum = drawing.call(aten.add.Tensor, drawing.call(aten.mul.Tensor, one.momentum, 0.5), one.gradient)
        move = drawing.call(aten.mul.Tensor, momentum, drawing.call(aten.neg.default, rate))
        _gives(drawing, one, drawing.call(aten.add.Tensor, one.shard, move), momentum)


def _foreach(drawing: Drawing, group: Sequence[DrawnParameter], rate: fx.Node) -> None:
    """SGD with momentum, by foreach operators on lists."""

    def parts(node: fx.Node) -> list[fx.Node]:
        return [drawing.program.part(node, place) for place in range(len(group))]

    halves = parts(drawing.call(aten._foreach_mul.Scalar, [one.momentum for one in group], 0.5))
    momenta = parts(drawing.call(aten._foreach_add.List, halves, [one.gradient for one in group]))
    moves = parts(drawing.call(aten._foreach_mul.Tensor, momenta, drawing.call(aten.neg.default, rate)))
    new = parts(drawing.call(aten._foreach_add.List, [one.shard for one in group], moves))
    for one, made, momentum in zip(group, new, momenta, strict=True):
        _gives(drawing, one, made, momentum)


def _decaying(drawing: Drawing, group: Sequence[DrawnParameter], rate: fx.Node) -> None:
    """With a part of the parameter that does not depend on the gradient, and a state that follows the parameter."""
    for one in group:
        kept = drawing.call(aten.mul.Tensor, one.shard, 0.5)
        new = drawing.call(aten.sub.Tensor, kept, drawing.call(aten.mul.Tensor, one.gradient, rate))
        _gives(drawing, one, new, drawing.call(aten.add.Tensor, one.momentum, new))


def _in_place(drawing: Drawing, group: Sequence[DrawnParameter], rate: fx.Node) -> None:
    """SGD whose momentum is updated in place."""
    for one in group:
        momentum = drawing.call(aten.add_.Tensor, one.momentum, one.gradient)
        move = drawing.call(aten.mul.Tensor, momentum, rate)
        drawing.results.append((drawing.call(aten.sub.Tensor, one.shard, move), f"param {one.fqn}"))


UPDATES = (_plain, _foreach, _decaying, _plain, _foreach, _decaying, _plain, _foreach, _in_place, _rounded)


def complete(drawing: Drawing) -> None:
    """Give each parameter its gradient and its update, the last used first."""
    if not drawing.drawn_parameters:
        return
    while any(one.gradient is None for one in drawing.drawn_parameters):
        gradient(drawing, DrawingStep("gradient"))
    while any(not one.updated for one in drawing.drawn_parameters):
        update(drawing, DrawingStep("update"))
    for node in drawing.program.graph.find_nodes(op="placeholder"):
        if node.name in _BUFFERS:
            with_role(node, f"buffer {node.name}")


STEPS: dict[str, tuple[Callable[[Drawing, DrawingStep], None], int]] = {
    "parameter": (parameter, 8),
    "gradient": (gradient, 3),
    "update": (update, 3),
}
"""Each step, and how often it is drawn."""
