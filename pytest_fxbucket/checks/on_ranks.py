"""Base of the checks that run a plan's step on ranks: what all of them are given, and how they run jobs there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.plan.selectors import parameters_of
from pytest_fxbucket.ranks.launch import available_memory
from pytest_fxbucket.step.iterations import CROSSING

if TYPE_CHECKING:
    from pytest_fxbucket.backends import BackendChoice
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Parameter, Phase, StepGraph, Value


@dataclass(frozen=True)
class OnRanks:
    """A check of one plan that runs its step on ranks."""

    context: Context
    choice: BackendChoice
    """The back end of its ranks, and why it is that."""

    @property
    def world(self) -> PlanOnMesh:
        """The plan at the size that ranks run."""
        return self.context.run_world

    @property
    def backend(self) -> str:
        """The back end of its ranks; for a check that cannot run there is no instance of this class."""
        return self.choice.backend or ""

    @property
    def over(self) -> str:
        """The back end, what kept it from GPUs, or how many ranks share one, for people."""
        said = self.choice.lacking or self.choice.shares
        return f"{self.backend} ({said})" if said else self.backend

    @property
    def idle_key(self) -> str:
        """The plan's key for gradients that may be zero, for people."""
        return f"[{'model' if self.world.plan.graph is None else 'graph'}] may_be_idle"

    def may_be_idle(self) -> set[str]:
        """Trainable parameters whose gradients the plan lets be zero. Raises :class:`PlanError` for what names none."""
        plan, step = self.world.plan, self.world.step(0)
        trainable = {one.fqn for one in step.parameters if one.trainable}
        names = {name: fqn for name, fqn in step.names.items() if fqn in trainable}
        entries = plan.traced.may_be_idle if plan.traced else ()
        return parameters_of(entries, names, step.modules, f"{plan.path}: {self.idle_key}", "trainable parameters")

    def ask(self, job: str, tasks: Sequence[object], check: str) -> list[Any]:
        """What ``job`` (``module:function``) gives for each rank's task. Raises RankError and RankFailure as a pool's run."""
        context = self.context
        return context.pools.get(self.world.size, self.backend, context.plan.run.ranks_per_gpu).run(
            job,
            tasks,
            timeout_s=context.plan.run.timeout_s,
            paths=[str(path) for path in context.paths],
            log_dir=context.folder.make(),
            what=f"{check} of {context.name}",
        )


def refuse_too_large(parameters: Sequence[Parameter], world: int, where: str, check: str = "bitwise") -> None:
    """Raise :class:`RankError`, beginning with ``where``, if the ranks' models together exceed the memory that is free here.

    ``check`` is the check that needs the models.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # of this machine, under torchrun
    needed = ranks * sum(prod(one.shape) * one.dtype.itemsize for one in parameters)
    if needed > (free := available_memory()):
        raise RankError(
            f"{where}: {ranks} ranks here would build {needed / 2**30:.1f} GiB of parameters, and {free / 2**30:.1f} GiB of "
            f"memory are free; run it on a smaller model in a row of [[matrix]] (model.args), or set checks.{check} = false"
        )


# Inputs and outputs of a plan's final step, which differ from the reference where transformations added or removed state.


Values = tuple["Value", ...]


def final_values(world: PlanOnMesh, rank: int, phase: Phase) -> tuple[Values, Values]:
    """Inputs and outputs of the final step, without carried values; both empty if they are those of the reference."""
    reference, final = world.reference(rank), world.final_step(rank)
    if final.pipelined is not None:
        return _of_stages(reference, final, phase)
    # Where work crosses iterations, set-up, steady and clean-up stand in the place of the one graph.
    phases = (phase,) if phase in final.graphs else CROSSING
    inputs, outputs = (
        tuple(dict.fromkeys(value for one in phases for value in side[one] if value.role != "carried"))
        for side in (final.inputs, final.outputs)
    )
    if (set(inputs), set(outputs)) == (set(reference.inputs[phase]), set(reference.outputs[phase])):
        return (), ()
    return inputs, outputs


def _of_stages(reference: StepGraph, final: StepGraph, phase: Phase) -> tuple[Values, Values]:
    """Values of the reference that a rank's pipeline stages have too, and state that only they have.

    The batch is always whole: ranks whose stages do not read all of it get it too.
    """
    sides = (reference.inputs[phase], final.inputs), (reference.outputs[phase], final.outputs)
    inputs, outputs = (
        (*(one for one in known if one.role == "batch" or one.key in _keys(has)), *_new_state(known, has))
        for known, has in sides
    )
    return inputs, outputs


def _new_state(known: Values, side: Mapping[Phase, Values]) -> Iterable[Value]:
    keys = {value.key for value in known}
    return dict.fromkeys(one for values in side.values() for one in values if one.role == "state" and one.key not in keys)


def _keys(side: Mapping[Phase, Values]) -> set[tuple[str, str]]:
    return {value.key for values in side.values() for value in values}


def added_state(world: PlanOnMesh) -> list[str]:
    """State that transformations added, by name: the reference has nothing to compare it with."""
    return sorted(_final_state(world) - _state(world.reference(0)))


def removed_state(world: PlanOnMesh) -> list[str]:
    """State that transformations removed, by name."""
    return sorted(_state(world.reference(0)) - _final_state(world))


def _final_state(world: PlanOnMesh) -> set[str]:
    """State of the final step; with pipeline stages, of all stages together."""
    # One rank of each stage.
    return {fqn for rank in world.mesh.ranks(0, "pp") for fqn in _state(world.final_step(rank))}


def _state(step: StepGraph) -> set[str]:
    return {fqn for role, fqn in _keys(step.inputs) if role == "state"}
