"""Legal graphs out of plain numbers: any list of steps is a program, so a failing one can be cut short."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fxbucket.fuzz import collective_steps, compute_steps
from pytest_fxbucket.fuzz.drawing import Drawing, Step

_STEPS = {**compute_steps.STEPS, **collective_steps.STEPS}
NAMES = tuple(name for name, (_, times) in _STEPS.items() for _ in range(times))
"""What a step may be: the simplest first; what there should be more of several times."""


def drawn(world: int, steps: Sequence[Step], inside: str = "") -> Drawing:
    """The program of ``steps``, not finished; it has a launch whatever they are. ``inside`` is before all modules' names."""
    drawing = Drawing(world, inside)
    for step in steps:
        _STEPS[step.what][0](drawing, step)
    if not drawing.modules:
        _STEPS["gather"][0](drawing, Step("gather"))
    return drawing
