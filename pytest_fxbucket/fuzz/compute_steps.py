"""Steps that compute, look at a value in another way, or write in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fxbucket.fuzz.drawing import DTYPES, Drawing, DrawingStep, pick
from pytest_fxbucket.fuzz.program import aten


def compute(drawing: Drawing, step: DrawingStep) -> None:
    """A sum, a product, a sum of two, or the negative."""
    value = pick(drawing.readable(), step.a)
    if step.b % 4 == 0:
        made = drawing.call(aten.sum.default, value)
    elif step.b % 4 == 1:
        # Modulo 7: numbers that double from step to step would soon be rounded.
        made = drawing.call(aten.remainder.Scalar, drawing.call(aten.mul.Tensor, value, 2), 7)
    elif step.b % 4 == 2:
        other = pick(drawing.readable(value.is_like), step.c)
        made = drawing.call(aten.remainder.Scalar, drawing.call(aten.add.Tensor, value, other), 7)
    else:
        made = drawing.call(aten.neg.default, value)
    drawing.add(made)


def random(drawing: Drawing, step: DrawingStep) -> None:
    """Random numbers."""
    drawing.add(drawing.call(aten.randint_like.default, pick(drawing.readable(), step.a), 5))


def cast(drawing: Drawing, step: DrawingStep) -> None:
    """To another dtype, or to its own."""
    value, dtype = pick(drawing.readable(), step.a), DTYPES[step.b % len(DTYPES)]
    source, plain = value, value.plain
    if dtype == torch.int64:  # which a large number would not fit
        source, plain = drawing.call(aten.remainder.Scalar, value, 7), False
    if step.c % 2:
        made = drawing.call(torch.ops.prims.convert_element_type.default, source, dtype)
    else:
        made = drawing.call(aten._to_copy.default, source, dtype=dtype)
    drawing.add(made, plain=plain)


def view(drawing: Drawing, step: DrawingStep) -> None:
    """A view of a value, in the same storage."""
    value = pick(drawing.readable(lambda v: v.fake.dim() > 0 and v.fake.numel() > 0), step.a)
    fake = value.fake
    rows = fake.shape[0]
    forms: list[tuple[Any, list[Any]]] = [
        (aten.slice.Tensor, [0, step.c % rows, rows]),
        (aten.slice.Tensor, [0, 0, rows, 2]),
        (aten.select.int, [0, step.c % rows]),
        (aten.unsqueeze.default, [0]),
        (aten.reshape.default, [[-1]]),  # may copy: to count it as a view only allows less
        (aten.split.Tensor, [1 + step.c % rows]),
    ]
    if fake.is_contiguous():
        forms += [(aten.view.default, [[-1]]), (aten._unsafe_view.default, [[fake.numel()]])]
    if fake.dim() == 2:
        forms += [(aten.t.default, []), (aten.permute.default, [[1, 0]])]
    if rows == 1 and fake.numel() <= 12:
        # Its rows share memory, so no step may write it, and are as many as a reduce-scatter can part.
        forms.append((aten.expand.default, [[2 * drawing.world, *fake.shape[1:]]]))
    target, args = pick(forms, step.b)
    made = drawing.call(target, value, *args)
    if target is aten.split.Tensor:
        made = drawing.program.part(made, step.a % len(made.meta["val"]))
    drawing.add(made, storage=value.storage, plain=value.plain)


def write(drawing: Drawing, step: DrawingStep) -> None:
    """A write in place of a value; also from a second one, if another storage has one of the same shape and dtype."""
    value = pick(drawing.writable(), step.a)
    if value is None:
        return
    other = pick(drawing.readable(lambda v: v.is_like(value) and v.storage != value.storage), step.c)
    alone: list[tuple[Any, list[Any], dict[str, Any]]] = [
        (aten._foreach_add_.Scalar, [[value.node], 1], {}),
        (aten.zero_.default, [value], {}),
        (aten.neg_.default, [value], {}),
    ]
    if other is not None:
        alone += [
            (aten.copy_.default, [value, other], {}),
            (aten._foreach_copy_.default, [[value.node], [other.node]], {}),
            (aten.add.out, [other, other], {"out": value.node}),
        ]
    # The plainest write comes last, where small numbers choose.
    target, args, kwargs = pick([*alone, (aten.add_.Tensor, [value, 1], {})], step.b)
    made = drawing.call(target, *args, **kwargs)
    # In-place foreach operators give nothing.
    if isinstance(made.meta["val"], torch.Tensor):
        drawing.add(made, storage=value.storage)


def give(drawing: Drawing, step: DrawingStep) -> None:
    """Let a value be an output."""
    drawing.returned.append(pick(drawing.readable(), step.a).node)


def nothing(drawing: Drawing, step: DrawingStep) -> None:
    """Do nothing: hypothesis can put this in place of a step that a failure does not need."""


def module(drawing: Drawing, step: DrawingStep) -> None:
    """Let what follows belong to another module."""
    drawing.program.module = drawing.inside + "abc"[step.a % 3]


def backward(drawing: Drawing, step: DrawingStep) -> None:
    """Let what follows belong to the backward."""
    drawing.program.backward = True


STEPS: dict[str, tuple[Callable[[Drawing, DrawingStep], None], int]] = {
    "nothing": (nothing, 1),
    "compute": (compute, 2),
    "cast": (cast, 1),
    "view": (view, 3),
    "write": (write, 4),
    "random": (random, 1),
    "give": (give, 1),
    "module": (module, 2),
    "backward": (backward, 1),
}
"""Each step, and how often it is drawn."""
