"""Inputs and outputs of a plan's final step, where transformations added or removed state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_fxbucket.iterating import CROSSING

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Phase, Value
    from pytest_fxbucket.world import World

Values = tuple["Value", ...]


def final_values(world: World, rank: int, phase: Phase) -> tuple[Values, Values]:
    """Inputs and outputs of the final step, but for what is carried; both empty if they are those of the reference."""
    reference, final = world.reference(rank), world.final_step(rank)
    phases = (phase,) if phase in final.graphs else CROSSING
    inputs, outputs = (
        tuple(_each_once(value for one in phases for value in side[one])) for side in (final.inputs, final.outputs)
    )
    if (set(inputs), set(outputs)) == (set(reference.inputs[phase]), set(reference.outputs[phase])):
        return (), ()
    return inputs, outputs


def added_state(world: World) -> list[str]:
    """State that transformations added, by name: nothing has it that it could be compared with."""
    known = {value.fqn for values in world.reference(0).inputs.values() for value in values}
    final = world.final_step(0)
    named = (value.fqn for values in final.inputs.values() for value in values if value.role == "state")
    return sorted({fqn for fqn in named if fqn not in known})


def removed_state(world: World) -> list[str]:
    """State that transformations removed, by name."""
    left = {value.fqn for values in world.final_step(0).inputs.values() for value in values}
    known = world.reference(0).inputs.values()
    return sorted({value.fqn for values in known for value in values if value.role == "state" and value.fqn not in left})


def _each_once(values: Iterable[Value]) -> Iterable[Value]:
    return dict.fromkeys(value for value in values if value.role != "carried")
