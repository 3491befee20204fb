"""The table of targets."""

from __future__ import annotations

from importlib import import_module

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.targets.setup import Setup, Target
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.words import nearest, one_or_other, show

__all__ = ["TARGETS", "Setup", "Target", "target_of"]

TARGETS = {
    "torch": "torch_pipelining:TorchTarget",
    "deepspeed": "deepspeed:DeepSpeedTarget",
    "megatron": "megatron:MegatronTarget",
}
"""By name the module in this folder, and its class."""


def target_of(name: str) -> Target:
    """The target ``name``, or what the callable that ``module:callable`` names gives, called without arguments.

    Raises :class:`StageError` for a name that is none, :class:`PlanError` for a callable that cannot be had.
    """
    if name in TARGETS:
        module, _, made = TARGETS[name].partition(":")
        found: Target = getattr(import_module(f"pytest_fxbucket.pipeline.targets.{module}"), made)()
        return found
    if ":" not in name:
        raise StageError(
            f"target {show(name)} is unknown, expected {one_or_other([*TARGETS, 'module:callable'])}{nearest(name, [*TARGETS])}"
        )
    found = import_callable(name, f"target {show(name)}")()
    for part in ("stage", "engine"):
        if not callable(getattr(found, part, None)):
            raise StageError(
                f"target {show(name)} gives a value of type {type(found).__name__} without {part}(), expected an object with "
                "stage(stages, index, setup) and engine(stages, setup)"
            )
    return found
