"""Steps that launch, and that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pytest_fxbucket.fuzz.drawing import MOST, Drawing, DrawingStep, ReadableValue, pick
from pytest_fxbucket.fuzz.program import aten, c10d

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_NAMES = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor", "all_reduce": "all_reduce"}


def start(kind: str, drawing: Drawing, step: DrawingStep, count: int = 1) -> None:
    """A launch of ``count`` tensors; every other one is waited for at once."""
    group = pick(drawing.groups, step.c)
    fitting = drawing.readable(lambda value: _fits(drawing, value, kind, group))
    # Three gathers in four send what a parameter could be, if there is such a value; the fourth anything.
    if kind == "all_gather" and step.b % 4:
        fitting = [value for value in fitting if value.plain] or fitting
    if fitting:
        launch(drawing, kind, [pick(fitting, step.a + i) for i in range(count)], step.b, group)
        if step.a % 2 == 0:
            drawing.wait()


def coalesced(drawing: Drawing, step: DrawingStep) -> None:
    """A launch of two or three tensors."""
    start(KINDS[step.c % 3], drawing, step, 2 + step.b % 2)


def _fits(drawing: Drawing, value: ReadableValue, kind: str, group: str) -> bool:
    fake, ranks = value.fake, drawing.program.ranks(group)
    if kind == "all_gather":
        # Gathers of what was gathered would grow from step to step.
        return fake.dim() > 0 and fake.numel() * ranks <= MOST
    # What is left, reduce_scatter and all_to_all, cuts rows into equal parts.
    return kind in ("all_reduce", "broadcast") or (fake.dim() > 0 and fake.shape[0] % ranks == 0)


def launch(drawing: Drawing, kind: str, sent: Sequence[ReadableValue], op: int, group: str) -> None:
    """Launch the collective ``kind`` of all of ``sent``; ``op`` chooses the reduction."""
    if kind in ("all_to_all", "broadcast"):
        send = getattr(drawing.program, f"launch_{kind}")
        for value in sent:
            drawing.fly([send(value.node, group)], [value], False)
        return
    integers = any(not value.fake.is_floating_point() for value in sent)
    # The average of integers is no integer.
    ops = ["max", "sum"] if integers else ["max", "avg", "sum"]
    says: list[Any] = [] if kind == "all_gather" else [pick(ops, op)]
    says += [] if kind == "all_reduce" else [drawing.program.ranks(group)]
    plain = kind == "all_gather" and all(value.plain for value in sent)
    if len(sent) == 1:
        made = [drawing.call(getattr(c10d, _NAMES[kind]).default, sent[0], *says, group)]
    else:
        nodes = [value.node for value in sent]
        several = drawing.call(getattr(c10d, f"{_NAMES[kind]}_coalesced").default, nodes, *says, group)
        made = [drawing.program.part(several, i) for i in range(len(nodes))]
    drawing.fly(made, sent, plain)


def gather_into(drawing: Drawing, step: DrawingStep) -> None:
    """An all-gather into a new buffer, or into a value that is there."""
    group = pick(drawing.groups, step.c)
    value = pick(drawing.readable(lambda v: _fits(drawing, v, "all_gather", group)), step.a)
    shape = [value.fake.shape[0] * drawing.program.ranks(group), *value.fake.shape[1:]]

    def is_room(other: ReadableValue) -> bool:
        fake = other.fake
        same = list(fake.shape) == shape and fake.dtype == value.fake.dtype and fake.is_contiguous()
        return same and other.storage != value.storage

    buffer = pick(drawing.writable(is_room), step.b) if step.b % 2 else None
    if buffer is None:
        buffer = drawing.add(drawing.program.buffer_for(value.node, group))
    if step.b % 4 == 0:  # nobody reads it but the launch
        drawing.values.remove(buffer)
    target, ranks = c10d.all_gather_into_tensor_out.default, drawing.program.ranks(group)
    node = drawing.call(target, value, ranks, group, out=buffer.node)
    drawing.fly([node], [value], value.plain, buffer.storage)


def all_reduce_in_place(drawing: Drawing, step: DrawingStep) -> None:
    """Reduce a value where it lies."""
    value = pick(drawing.writable(lambda v: v.fake.is_contiguous()), step.a)
    if value is not None:
        node = drawing.call(c10d.all_reduce_.default, value, "sum", pick(drawing.groups, step.c))
        drawing.fly([node], [value], False, value.storage)


def cast_and_launch(drawing: Drawing, step: DrawingStep) -> None:
    """Two casts, perhaps a write to what was cast, and the launches of both."""
    kind = KINDS[step.c % 3]
    fitting = drawing.readable(lambda v: _fits(drawing, v, kind, "0") and v.fake.dtype == torch.float32)
    if kind == "all_gather":
        fitting = [value for value in fitting if value.plain]
    pair = [pick(fitting, step.a + i) for i in range(2 if fitting else 0)]
    casts = [drawing.call(aten._to_copy.default, value, dtype=torch.bfloat16) for value in pair]
    # Written behind the cast: a pass that casts in its pack instead would send the new value.
    writable = drawing.writable(lambda value: value in pair)
    if step.b % 2 and writable:
        drawing.call(aten.add_.Tensor, writable[0], 1)
    # The casts are no values of the drawing, so nothing but their launches reads them.
    for value, cast in zip(pair, casts, strict=True):
        launch(drawing, kind, [ReadableValue(cast, drawing.new_storage(), value.plain)], step.b, "0")


def accumulate(drawing: Drawing, step: DrawingStep) -> None:
    """Two gradients that are reduced, and read by nothing but their sum."""
    kind = KINDS[1 + step.c % 2]
    fitting = drawing.readable(lambda v: _fits(drawing, v, kind, "0"))
    first = pick(fitting, step.a)
    both = [first, pick([value for value in fitting if value.is_like(first)], step.c)] if fitting else []
    brought = []
    for value in both:
        launch(drawing, kind, [value], step.b, "0")
        drawing.wait()
        brought.append(drawing.values.pop())
    if brought:
        drawing.add(drawing.call(aten.add.Tensor, *brought))


def symbolic(drawing: Drawing, step: DrawingStep) -> None:
    """A launch of rows of a symbolic size."""
    if len(drawing.symbolic) < 2 or step.b % 4 == 3:
        rows = (2 * drawing.world * drawing.world, drawing.world)[step.b % 2]
        drawing.add(drawing.program.dynamic(f"s{len(drawing.symbolic)}", rows, 3), plain=True)
    kind = KINDS[step.c % 3]
    ranks = drawing.world if kind == "reduce_scatter" else 1
    fitting = [value for value in drawing.symbolic if 0 < value.rows <= 256 and value.rows % ranks == 0]
    value = pick(fitting, step.a)
    if step.b % 3 == 0:
        value = drawing.add(drawing.call(aten.neg.default, value))
    launch(drawing, kind, [value], step.b, "0")
    if step.a % 2 == 0:
        drawing.wait()


def wait(drawing: Drawing, step: DrawingStep) -> None:
    """Wait for what is in flight."""
    drawing.wait(step.a)


def wait_again(drawing: Drawing, step: DrawingStep) -> None:
    """Wait once more for what was waited for."""
    one = pick([one for one in drawing.waited if not one.fills], step.a)
    if one is not None:
        drawing.add(drawing.program.wait(one.node), storage=one.storage, plain=one.plain)


STEPS: dict[str, tuple[Callable[[Drawing, DrawingStep], None], int]] = {
    "gather": (partial(start, "all_gather"), 6),
    "reduce": (partial(start, "reduce_scatter"), 5),
    "all_reduce": (partial(start, "all_reduce"), 3),
    "coalesced": (coalesced, 2),
    "gather_into": (gather_into, 2),
    "all_reduce_in_place": (all_reduce_in_place, 1),
    "cast_and_launch": (cast_and_launch, 2),
    "all_to_all": (partial(start, "all_to_all"), 1),
    "broadcast": (partial(start, "broadcast"), 1),
    "accumulate": (accumulate, 1),
    "symbolic": (symbolic, 1),
    "wait": (wait, 3),
    "wait_again": (wait_again, 1),
}
"""Each step, and how often it is drawn."""
