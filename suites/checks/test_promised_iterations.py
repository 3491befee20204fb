"""The audit of a step that crosses iterations: red for each thing that can be wrong, told from its graphs alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pytest_fxbucket.checks.promises.iterations import ReadPhase, hidden_by_nothing, iteration_problems
from pytest_fxbucket.step.portable import own_copy
from pytest_fxbucket.step.roles import StepGraph
from suites.checks.moved_graphs import BROKEN
from suites.graph.whole_steps import Kind, WholeStep
from suites.transforms.moved_steps import bucketed, moved, phased

ENTRIES = ["c", "d"]
ENTRY_OF = {f"{layer}.{name}": layer for layer in ENTRIES for name in "wb"}
SAID = {
    "rate_of_this_call": "graph steady makes param c.w of the call before with hyper optimizers.0.groups.0.lr of this one",
    "rate_of_the_first_call": "graph steady hands on optimizers.0.groups.0.lr of the call before, not its own",
    "rate_not_copied": "graph setup hands on optimizers.0.groups.0.lr as it is, where the next call may find it changed",
    "swapped": "graph setup hands on mul_tensor_9 as the gradient of d.w, which mul_tensor_11 makes",
    "not_updated": "graph steady does not update param c.w",
    "old_parameter": "cat_2 reads c.w as the call before found it, not as it left it",
    "waited_for_at_once": "the reduce_scatter of d is waited for before the compute of b.b, which could hide it",
    "launched_late": "the reduce_scatter of d is launched behind the compute of a.w, which could hide it",
    "reduced_in_setup": "graph setup launches the backward reduce_scatter of no parameter once, expected never",
}


@cache
def whole(kind: Kind) -> StepGraph:
    return bucketed(WholeStep("abcd", kind))


@cache
def before(kind: Kind) -> ReadPhase:
    return phased(whole(kind), "joint")


def moved_by(entries: list[str], kind: Kind = "foreach") -> StepGraph:
    """The step of which ``entries`` are updated a call late."""
    step = whole(kind)
    return moved(replace(step, graphs={phase: own_copy(one) for phase, one in step.graphs.items()}), entries)


def problems(after: StepGraph, kind: Kind = "foreach") -> list[str]:
    return iteration_problems(ENTRY_OF, before(kind), {phase: phased(after, phase) for phase in after.graphs})


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain"])
def test_nothing_is_said_of_what_keeps_its_promise(kind: Kind) -> None:
    assert problems(moved_by(ENTRIES, kind), kind) == []


@pytest.mark.parametrize("change", SAID)
def test_what_is_broken_is_said(change: str) -> None:
    after = moved_by(ENTRIES)
    BROKEN[change](after)
    found = problems(after)
    assert SAID[change] in found, "\n".join(found)


def test_an_entry_that_is_read_first_is_hidden_by_nothing() -> None:
    after = moved_by(["a", "d"])
    entry_of = {"a.w": "a", "a.b": "a", "d.w": "d", "d.b": "d"}
    assert hidden_by_nothing(entry_of, phased(after, "steady")) == ["a"]


def test_an_entry_that_did_not_move_is_said() -> None:
    found = problems(moved_by(["d"]))
    assert "graph setup launches the backward reduce_scatter of c.w, c.b once, expected never" in found
    assert "graph setup updates param c.w" in found
    assert "graph cleanup does not update param c.w" in found
