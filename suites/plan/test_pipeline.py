"""``[pipeline]`` and ``parallel.pp``: what they take, and the one sentence of what cannot stand together."""

from __future__ import annotations

import pytest

from suites.plan.plan_texts import BUCKET, MODEL, plan_of, plans_of, refusal

CUTS = 'cuts = ["layers.1", "layers.3", "layers.5"]\n'


def text(pipeline: str, pp: int = 4, microbatches: int = 8, rest: str = "") -> str:
    parallel = f"[parallel]\ndp_shard = 4\npp = {pp}\n"
    return f"{MODEL}{BUCKET}{parallel}[pipeline]\n{pipeline}\n[step]\nmicrobatches = {microbatches}\n{rest}"


def test_a_plan_without_the_table_is_one_stage() -> None:
    plan = plan_of(MODEL, BUCKET, "[parallel]\ndp_shard = 4\n")
    assert plan.pipeline is None
    assert plan.stages == 1


def test_cuts_and_their_schedule_reach_the_plan() -> None:
    plan = plan_of(text(f'{CUTS}schedule = "GPipe"'))
    assert plan.pipeline is not None
    assert plan.pipeline.cuts == ("layers.1", "layers.3", "layers.5")
    assert (plan.pipeline.stages, plan.pipeline.balance, plan.pipeline.schedule) == (None, "parameters", "GPipe")
    assert (plan.stages, plan.world_size) == (4, 16)
    assert plan.degrees == {"pp": 4, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1}


def test_stages_whose_cuts_are_proposed_reach_the_plan() -> None:
    plan = plan_of(text('stages = 4\nbalance = "flops"'))
    assert plan.pipeline is not None
    assert (plan.pipeline.cuts, plan.pipeline.stages, plan.pipeline.balance) == ((), 4, "flops")
    assert (plan.stages, plan.pipeline.schedule) == (4, "1F1B")


@pytest.mark.parametrize(("schedule", "pp"), [("Interleaved1F1B", 2), ("LoopedBFS", 1), ("ZBVZeroBubble", 2), ("1F1B", 4)])
def test_stages_are_spread_over_the_ranks_that_a_schedule_has(schedule: str, pp: int) -> None:
    assert plan_of(text(f'stages = 4\nschedule = "{schedule}"', pp)).degrees["pp"] == pp


def test_rows_of_a_matrix_have_schedules_and_cuts_of_their_own() -> None:
    rows = (
        '[[matrix]]\nid = "gpipe"\npipeline.schedule = "GPipe"\n'
        '[[matrix]]\nid = "two"\npipeline.cuts = ["layers.3"]\nparallel.pp = 2\n'
        '[[matrix]]\nid = "proposed"\npipeline.cuts = []\npipeline.stages = 4\n'
    )
    base, gpipe, two, proposed = plans_of(text(CUTS), rows)
    assert [plan.pipeline and plan.pipeline.schedule for plan in (base, gpipe, two)] == ["1F1B", "GPipe", "1F1B"]
    assert [plan.stages for plan in (base, gpipe, two, proposed)] == [4, 4, 2, 4]
    assert (two.pipeline and two.pipeline.cuts, proposed.pipeline and proposed.pipeline.cuts) == (("layers.3",), ())


def test_ranks_of_a_pipeline_need_not_shard_within_a_stage() -> None:
    for mode in ("fully_shard", "replicate"):
        parallel = f'[parallel]\nmode = "{mode}"\npp = 2\n'
        assert plan_of(MODEL, BUCKET, parallel, "[pipeline]\nstages = 2\n[step]\nmicrobatches = 2\n").world_size == 2


def test_a_smaller_world_may_have_fewer_ranks_that_the_schedule_fits() -> None:
    plan = plan_of(text('stages = 8\nschedule = "LoopedBFS"', 8, rest="[run]\nworld = { pp = 2, dp_shard = 2 }\n"))
    assert (plan.world_size, plan.run_world) == (32, 4)


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ('cuts = "layers.1"', 'cuts must be a list of module paths such as ["layers.3", "layers.7"], not "layers.1"'),
        ("cuts = [3]", "cuts[0] must be the path of a module in quotes, not 3"),
        ('cuts = ["a", ""]', "cuts[1] is an empty name; name the module behind which a stage ends, or take it out"),
        ('cuts = ["a", "b", "a"]', 'cuts has "a" twice; name it once'),
        ('cuts = ["a..b"]', 'cuts[0] = "a..b" is no path of one module; write it out, as in "layers.3"'),
        ('cuts = ["layers.*"]', 'cuts[0] = "layers.*" is no path of one module; write it out, as in "layers.3"'),
        ("stages = 1", "stages must be a whole number of at least 2, not 1"),
        ("stages = true", "stages must be a whole number of at least 2, not true"),
        (
            'stages = 4\nbalance = "flop"',
            'balance must be "parameters", "flops" or "seconds", not "flop"; did you mean "flops"?',
        ),
        (
            'stages = 4\nschedule = "1f1b"',
            'schedule must be "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble" or '
            '"DualPipeV", not "1f1b"; did you mean "1F1B"?',
        ),
        ('stages = 4\nschedule = "zbvzerobubble"', 'not "zbvzerobubble"; did you mean "ZBVZeroBubble"?'),
        ('stages = 4\nschedule = "ScheduleGPipe"', 'not "ScheduleGPipe"; did you mean "GPipe"?'),
        ('stages = 4\nschedule = "ScheduleInterleaved1F1B"', '; did you mean "Interleaved1F1B"?'),
        ('stages = 4\nshedule = "GPipe"', 'has no key "shedule"; did you mean "schedule"?'),
        ("stages = 4\npp = 4", 'has no key "pp"; pp is a key of [parallel]'),
        (
            "",
            'says nowhere where a stage ends; write cuts, as in cuts = ["layers.3"], or stages = 4, of which the cuts are '
            "proposed",
        ),
        ("cuts = []", "says nowhere where a stage ends; write cuts"),
        ('cuts = ["a"]\nstages = 2', "has both cuts and stages = 2; keep cuts, or stages, of which the cuts are proposed"),
        (
            f'{CUTS}balance = "seconds"',
            'balance = "seconds" is of cuts that are proposed, and here they are written; leave it out, or write stages '
            "instead of cuts",
        ),
    ],
)
def test_a_wrong_value_is_told_with_what_was_expected(pipeline: str, says: str) -> None:
    said = refusal(text(pipeline))
    assert said.startswith("[pipeline] ")
    assert says in said


@pytest.mark.parametrize(
    ("schedule", "stages", "pp", "says"),
    [
        (
            "1F1B",
            4,
            1,
            'pp = 1 does not fit the 4 stages of [pipeline], of which schedule = "1F1B" has one on each rank; use pp = 4',
        ),
        (
            "GPipe",
            2,
            8,
            'pp = 8 does not fit the 2 stages of [pipeline], of which schedule = "GPipe" has one on each rank; use pp = 2',
        ),
        ("LoopedBFS", 6, 4, 'schedule = "LoopedBFS" has as many on each rank; use pp = 3'),
        ("Interleaved1F1B", 4, 16, 'schedule = "Interleaved1F1B" has as many on each rank; use pp = 4'),
        ("ZBVZeroBubble", 8, 8, 'schedule = "ZBVZeroBubble" has two on each rank; use pp = 4'),
        ("DualPipeV", 3, 2, 'schedule = "DualPipeV" has two on each rank; cut the model into 4'),
    ],
)
def test_ranks_that_do_not_fit_the_stages_are_told_with_those_that_do(schedule: str, stages: int, pp: int, says: str) -> None:
    said = refusal(text(f'stages = {stages}\nschedule = "{schedule}"', pp, 16))
    assert said.startswith(f"[parallel] pp = {pp} does not fit the {stages} stages of [pipeline], ")
    assert said.endswith(says)


def test_written_cuts_are_counted_as_stages() -> None:
    assert refusal(text(CUTS, 2)).startswith("[parallel] pp = 2 does not fit the 4 stages of [pipeline]")


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "says"),
    [
        ("1F1B", 4, 2, "takes at least as many as there are stages, 4; use 4"),
        ("DualPipeV", 2, 1, "takes at least as many as there are stages, 4; use 4"),
        ("Interleaved1F1B", 2, 5, "runs them in 2 rounds of 2 or more, each of as many; use 6"),
        ("InterleavedZeroBubble", 4, 9, "runs them in 2 rounds of 4 or more, each of as many; use 10"),
        ("Interleaved1F1B", 4, 13, "runs them in 3 rounds of 4 or more, each of as many; use 12"),
    ],
)
def test_microbatches_that_a_schedule_cannot_take_are_told(schedule: str, pp: int, microbatches: int, says: str) -> None:
    said = refusal(text(f'stages = 4\nschedule = "{schedule}"', pp, microbatches))
    assert said == f'[step] microbatches = {microbatches} is not for [pipeline] schedule = "{schedule}", which {says}'


def test_ranks_without_stages_are_told_what_is_missing() -> None:
    says = "[parallel] pp = 2 has no stages to spread; add [pipeline], as in stages = 2, or leave pp out"
    assert refusal(MODEL, BUCKET, "[parallel]\ndp_shard = 4\npp = 2\n") == says


@pytest.mark.parametrize(
    ("pipeline", "pp", "world", "says"),
    [
        (
            CUTS, 4, 2,
            '[run] world.pp = 2 does not fit the 4 stages of [pipeline], of which schedule = "1F1B" has one on each rank; '
            "leave it out",
        ),
        (
            'stages = 12\nschedule = "LoopedBFS"', 12, 5,
            '[run] world.pp = 5 does not fit the 12 stages of [pipeline], of which schedule = "LoopedBFS" has as many on each '
            "rank; use world.pp = 6",
        ),
        (
            'stages = 8\nschedule = "Interleaved1F1B"\n[step]\nmicrobatches = 9', 8, 4,
            '[step] microbatches = 9 is not for [pipeline] schedule = "Interleaved1F1B" on [run] world.pp = 4, which runs them '
            "in 2 rounds of 4 or more, each of as many; use 10",
        ),
        (CUTS, 4, 8, "[run] world.pp = 8 is more than [parallel] pp = 4; world is for a smaller mesh"),
    ],
)  # fmt: skip
def test_a_smaller_world_that_does_not_fit_is_told(pipeline: str, pp: int, world: int, says: str) -> None:
    step = "" if "[step]" in pipeline else "[step]\nmicrobatches = 12\n"
    plan = (
        f"{MODEL}{BUCKET}[parallel]\ndp_shard = 4\npp = {pp}\n[run]\nworld = {{ pp = {world} }}\n[pipeline]\n{pipeline}\n{step}"
    )
    assert refusal(plan) == says
