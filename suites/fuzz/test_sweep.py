"""The small programs that each search begins with: legal, of everything that may meet, and enough for torch's known faults."""

from __future__ import annotations

from itertools import chain

import pytest

from pytest_fxbucket.fuzz.finds import PLAN, features_of
from pytest_fxbucket.fuzz.judge import judged, problems
from pytest_fxbucket.fuzz.small_programs import sweeps
from pytest_fxbucket.fuzz.tried_pass import subject_of
from suites.fuzz.hunt import swept
from suites.passes.test_beside_torch import of_a_version_in_the_table
from suites.soak.known_faults import known_faults

SCHEDULER = "pytest_fxbucket.compat.torch_scheduler:schedule_overlap_bucketing"
FEATURES = {
    *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "all_reduce", "all_reduce_"),
    *("all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast"),
    *("a buffer that is read", "a write", "a write through an alias", "a view", "a cast", "random numbers", "no elements"),
    *("a launch of what was launched", "a launch of what was launched on another group", "another group", "a group of one"),
    *("waited for twice", "several dtypes", "both directions", "a symbolic size", "a model inside another module"),
    *("a reduction that is read", "a reduction that is read before the next", "reductions that are added"),
    "a model of another name",
}


def test_small_programs_are_legal_and_have_everything_that_may_meet() -> None:
    found: set[str] = set()
    for trial in next(sweeps(3, subject_of("torch"))):
        said = problems(trial.program, [trial.graph_module.graph] * 3)
        assert [text for text in said if "is waited for 2 times" not in text] == []
        found |= features_of(trial)
    assert found >= FEATURES


@of_a_version_in_the_table
@pytest.mark.parametrize(("name", "faults"), [("torch", 23), (SCHEDULER, 6)], ids=["manual", "automatic"])
def test_they_show_each_known_fault_of_torchs_passes(name: str, faults: int) -> None:
    subject = subject_of(name)
    judged(next(chain(*sweeps(2, subject))), subject, PLAN)  # what torch imports then may take longer than a pass may
    left = list(known_faults(subject).values())
    assert len(left) >= faults
    for trial in chain(*sweeps(2, subject)):
        if not left:
            break
        # A fault is of a find whose trial has no more than the fault needs, so other trials cannot show it.
        has = features_of(trial)
        if any(has <= one.features for one in left):
            find = judged(trial, subject, PLAN)
            left = [one for one in left if find is None or not one.is_of([find])]
    assert left == []


def test_nothing_is_found_of_ours() -> None:
    """Of every third; ``make soak`` tries all."""
    swept(2, 3)
