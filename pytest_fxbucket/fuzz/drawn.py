"""Legal graphs out of plain numbers: any list of steps is a program, so a failing one can be cut short."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fxbucket.fuzz import collective_steps, compute_steps, training_steps
from pytest_fxbucket.fuzz.drawing import Drawing, Step

_STEPS = {**compute_steps.STEPS, **collective_steps.STEPS, **training_steps.STEPS}


def _often(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names for _ in range(_STEPS[name][1]))


NAMES = _often(*compute_steps.STEPS, *collective_steps.STEPS)
"""What a step may be: the simplest first; what there should be more of several times."""
TRAINING = _often(*compute_steps.STEPS, *training_steps.BESIDE, *training_steps.STEPS)
"""What it may be in a whole training step."""


def drawn(world: int, steps: Sequence[Step], inside: str = "") -> Drawing:
    """The program of ``steps``, not finished; it has a launch whatever they are. ``inside`` is before all modules' names."""
    drawing = Drawing(world, inside)
    for step in steps:
        _STEPS[step.what][0](drawing, step)
    training_steps.complete(drawing)
    if not drawing.modules:
        _STEPS["gather"][0](drawing, Step("gather"))
    return drawing
