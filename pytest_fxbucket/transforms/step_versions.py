"""One rank's step at each stop: as captured, behind each transformation, before and behind the pass, and as it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.fake_tensors import FakeTensorMode

if TYPE_CHECKING:
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.step.roles import Phase, StepGraph
    from pytest_fxbucket.transforms.registry import State, TransformOutput


@dataclass(frozen=True)
class StepVersions:
    """One rank's step at each stop from the one that bitwise compares with to the one that runs."""

    reference: StepGraph
    """The step that the final one is compared with bit for bit: as captured, or behind the last transformation that rounds."""
    before: tuple[TransformOutput, ...]
    """The step behind each transformation before the pass."""
    step: StepGraph
    """What the pass was given."""
    passed: Mapping[Phase, Passed]
    """The graphs as they came out of the pass."""
    after: tuple[TransformOutput, ...]
    """The step behind each transformation after the pass."""
    final_step: StepGraph
    final: Mapping[Phase, Passed]
    """The graphs that ranks run; those that came out of the pass if nothing follows."""


@dataclass(frozen=True)
class BeforePass:
    """The stops of :class:`StepVersions` up to the pass."""

    reference: StepGraph
    before: tuple[TransformOutput, ...]
    step: StepGraph
    state: State
    """First tensor of each state of the step, by name."""


def state_of(step: StepGraph) -> State:
    """First tensor of each state by name: real ones for state added before, fake ones for an optimizer's own state."""
    # An optimizer's state gets its values on the ranks. Here transformations only see it, and may remove it.
    values = {value.fqn: value for values in step.inputs.values() for value in values if value.role == "state"}
    with FakeTensorMode():
        fakes = {fqn: torch.empty(value.shape, dtype=value.dtype) for fqn, value in values.items()}
    return {**fakes, **{fqn: one.clone() for fqn, one in step.first_state.items()}}


def with_first_state(step: StepGraph, captured: StepGraph, state: State) -> StepGraph:
    """``step`` with the first tensors of ``state`` that is not in ``captured``; ``step`` itself if none was added."""
    known = {value.fqn for values in captured.inputs.values() for value in values if value.role == "state"}
    added = {fqn: tensor for fqn, tensor in state.items() if fqn not in known}
    return replace(step, first_state={**captured.first_state, **added}) if added else step
