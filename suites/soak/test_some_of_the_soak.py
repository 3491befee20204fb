"""A tenth of the soak's items in a row and of its models in stages, and a little of its other parts: 3 runs of a plan, of
which the last has a new server, each signal amid collectives once, 2 kills of runs that accept, 80 mutants. Of comparisons of
step time, which only the whole soak makes, what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.ranks.fault_jobs import FAULTS
from suites.soak.garbage import garbage
from suites.soak.kills import kills
from suites.soak.parts import faults, items, verdicts
from suites.soak.pipelines import pipelines
from suites.soak.random_models import KINDS, SCHEDULES, plan_of, shapes_of
from suites.soak.run import ITEMS, PIPELINES
from suites.soak.speeds import speeds
from suites.soak.speeds_project import Run, SpeedsProject

PART = 10
MODELS = (20, 47, 48, 49, 69, 277, 370, 420, 466, 503, 552, 560, 569, 703, 866)
MODELS += (990, 1052, 1415, 1562, 1614, 1655, 1785, 2089, 2104, 2105, 2226, 2265, 2526, 2558, 2660)
"""Few blocks and microbatches, each of which is traced; yet nearly all that a block or a plan may have is here with every
schedule: kinds, ties, what is frozen, numbers of stages and ranks, optimizers, clipping."""
UNITS = {5: 20, 10: 40}
"""What rank 1 does more, by per cent."""


def test_items_in_a_row_leave_everything_where_it_was():
    assert list(items(ITEMS // PART, print)) == []


def test_a_little_of_the_soak_is_well():
    # Of faults that are jobs one: the ranks' own tests have each.
    problems = [*verdicts(3, print), *faults(1, 1, print, FAULTS[:1]), *kills(2, 1, print), *garbage(80, 1, print)]
    # How late a failure is told depends on the machine: the whole soak looks at that.
    assert [problem for problem in problems if " s late, " not in problem] == []


def test_a_tenth_of_the_random_models_in_pipeline_stages_equal_their_whole_steps() -> None:
    assert {one.schedule for number in MODELS if (one := plan_of(number).pipeline)} == set(SCHEDULES)
    assert {shape.kind for number in MODELS for shape in shapes_of(number)} == set(KINDS)
    assert len(MODELS) == PIPELINES // PART
    assert list(pipelines(MODELS, print)) == []


@pytest.mark.parametrize(
    ("equal", "slowed", "says"),
    [
        ("same", "slower", []),
        ("slower", "slower", ["2 of 2 runs of equal commits raised an alarm"]),
        (
            "same",
            "same",
            [f"0 of 20 steps slowed by {share} % were found, where {least} must be" for share, least in ((10, 19), (5, 15))],
        ),
    ],
    ids=["well", "alarm", "missed"],
)
def test_wrong_verdicts_of_comparisons_are_told(
    monkeypatch: pytest.MonkeyPatch, equal: str, slowed: str, says: list[str]
) -> None:
    def verdict(project: SpeedsProject, old: str, new: str, budget_s: float) -> Run:
        extra = int((project.folder / "extra.txt").read_text())
        assert (old, extra) == ("extra-0", UNITS[10]), "the last commit is the slowest"
        return Run(0, equal if new == old else slowed)

    monkeypatch.setattr(SpeedsProject, "compare", verdict)
    assert list(speeds(2, 20, seed=1, say=print, units=UNITS)) == says


def test_a_comparison_without_a_verdict_is_told_in_the_commands_words(tmp_path: Path) -> None:
    project = SpeedsProject(tmp_path / "project")
    run = project.compare(project.commit(0), "extra-9", budget_s=1.0)
    assert (run.status, "REF extra-9 is no commit" in run.verdict) == (2, True)
