"""Runs transformations on a step, one after the other, on copies, and looks at what each left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.errors import FxbucketError, PassError, PlanError
from pytest_fxbucket.graph.own_copy import own_copy
from pytest_fxbucket.transforms.invariants import Looked, look, refuse_broken
from pytest_fxbucket.transforms.pairing import refuse_unpaired
from pytest_fxbucket.transforms.traits import traits_of

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.capture.roles import Phase, StepGraph

State = dict[str, "torch.Tensor"]
Transform = Callable[..., "StepGraph"]
"""``(step, state, **args)`` to the same step, changed. The graphs are the transformation's own: it may work in place.

To add state: a placeholder, its :class:`Value` among the inputs at the same place, a new value among the outputs, and its first
tensor in the dict. To remove it: out of all of them.
"""
_NEEDS = {
    "roles": "the roles of the graph's inputs and outputs; let the [graph] factory return a TracedStep with roles and fqns",
    "optimizer": "the update of an optimizer, and the step has none; add [optimizer]",
}


@dataclass(frozen=True)
class Stage:
    """One transformation of a step, with its arguments."""

    name: str
    where: str
    """For errors: where it is asked for, and its name."""
    function: Transform
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Staged:
    """A step as a transformation left it."""

    name: str
    step: StepGraph
    looked: Mapping[Phase, Looked]


def run_stages(stages: Sequence[Stage], step: StepGraph, state: State) -> list[Staged]:
    """The step after each of ``stages``, with its rank's process groups in place; ``step`` itself is left as it is.

    ``state`` has all state by name, and is changed. Raises PlanError for arguments that a transformation does not take,
    CaptureError or PassError, one sentence that names it, for one that cannot be done or that breaks the step.
    """
    found: list[Staged] = []
    looked = look(step) if stages else {}
    for stage in stages:
        step = _run(stage, step, state)
        with _naming(stage):
            after = look(step, looked)
        refuse_broken(stage.where, looked, after, traits_of(stage.function).keeps_collectives)
        found.append(Staged(stage.name, step, after))
        looked = after
    return found


def _run(stage: Stage, step: StepGraph, state: State) -> StepGraph:
    _refuse_args(stage, step, state)
    _refuse_needs(stage, step)
    mine = replace(step, graphs={phase: own_copy(module) for phase, module in step.graphs.items()})
    with _naming(stage), blamed(lambda: stage.where):
        after = stage.function(mine, state, **stage.args)
    refuse_unpaired(stage.where, step, after, state)
    for graph_module in after.graphs.values():
        graph_module.recompile()
    return after


@contextmanager
def _naming(stage: Stage) -> Iterator[None]:
    """Errors for people begin with where the transformation is asked for."""
    try:
        yield
    except FxbucketError as error:
        if stage.where in str(error):
            raise
        raise type(error)(f"{stage.where}: {str(error).removeprefix(f'{stage.name}: ')}") from error


def _refuse_args(stage: Stage, step: StepGraph, state: State) -> None:
    try:
        signature(stage.function).bind(step, state, **stage.args)
    except TypeError as error:
        raise PlanError(f"{stage.where}: {error}; its args are its keyword arguments") from None


def _refuse_needs(stage: Stage, step: StepGraph) -> None:
    has = {
        "roles": step.has_roles,
        "optimizer": any(value.role == "param" for values in step.outputs.values() for value in values),
    }
    if missing := next((need for need in traits_of(stage.function).needs if not has[need]), None):
        raise PassError(f"{stage.where} needs {_NEEDS[missing]}")
