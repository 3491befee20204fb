"""Tables of torch's schedules: as torch orders them, and none of them wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product

import pytest
import torch.distributed as dist

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.played import bubble, bubble_by_the_book
from pytest_fxbucket.pipeline.problems import table_problems
from pytest_fxbucket.pipeline.schedules import TRANSFERS, leaves, table_of, text_of
from pytest_fxbucket.plan.pipeline_schedules import SCHEDULES

SIZES = {
    name: [(pp * (1 if name in ("GPipe", "1F1B") else each), pp, m) for pp, each, m in product((1, 2, 4), counts, (4, 8, 16))]
    for name in SCHEDULES
    for counts in [(2,) if name in ("ZBVZeroBubble", "DualPipeV") else (1,) if name in ("GPipe", "1F1B") else (1, 2, 3)]
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_table_of_torch_is_wrong_and_each_has_all_of_every_microbatch(name: str) -> None:
    made = 0
    for stages, pp, microbatches in SIZES[name]:
        if name == "DualPipeV" and microbatches < stages:
            continue
        table = table_of(name, stages, pp, microbatches)
        assert table_problems(table) == ()
        assert len(table.ranks) == pp
        assert [action.rank for own in table.ranks for action in own] == [r for r, own in enumerate(table.ranks) for _ in own]
        kinds = [action.kind for own in table.ranks for action in leaves(own)]
        assert kinds.count("F") == kinds.count("B") + kinds.count("I") == stages * microbatches
        assert kinds.count("I") == kinds.count("W")
        between = sum(one != other for one, other in zip(table.owners, table.owners[1:], strict=False))
        assert sum(kind in TRANSFERS for kind in kinds) == 4 * between * microbatches
        assert 0 <= bubble(table) < 1
        made += 1
    assert made >= 7
    assert not dist.is_initialized()


def test_the_order_of_1f1b_is_what_its_class_runs_batches_included() -> None:
    assert text_of(table_of("1F1B", 2, 2, 3)) == (
        "1F1B: 2 stages on 2 ranks, 3 microbatches\n"
        "rank 0: 0F0 0SEND_F0 0F1 [0SEND_F1 0RECV_B0] 0B0 0F2 [0SEND_F2 0RECV_B1] 0B1 0RECV_B2 0B2 0REDUCE_GRAD\n"
        "rank 1: 1RECV_F0 1F0 1B0 [1SEND_B0 1RECV_F1] 1F1 1B1 [1SEND_B1 1RECV_F2] 1F2 1B2 1SEND_B2 1REDUCE_GRAD\n"
    )


def test_parameters_are_gathered_and_gradients_reduced_once_a_stage_in_looped_schedules() -> None:
    assert text_of(table_of("LoopedBFS", 4, 2, 2)).splitlines()[2] == (
        "rank 1: 1UNSHARD 3UNSHARD 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1 3B1 3SEND_B1 1RECV_B1 "
        "3B0 3SEND_B0 1RECV_B0 3REDUCE_GRAD 3RESHARD 1B1 1SEND_B1 1B0 1SEND_B0 1REDUCE_GRAD 1RESHARD"
    )


def test_a_v_has_the_first_and_the_last_stage_on_one_rank_and_overlapped_pairs() -> None:
    table = table_of("DualPipeV", 4, 2, 4)
    assert table.owners == (0, 1, 1, 0)
    pairs = [action for own in table.ranks for action in own if action.parts]
    assert len(pairs) == 6
    assert {tuple(part.kind for part in pair.parts) for pair in pairs} == {("F", "B")}
    assert (pairs[0].stage, pairs[0].microbatch, pairs[0].token) == (0, 3, "(0F3 3B1)")
    assert "(0F3 3B1) 0SEND_F3 3SEND_B1" in text_of(table)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (2, 2), (2, 8), (4, 4), (4, 32), (8, 8)])
def test_gpipe_and_1f1b_idle_by_the_book(pp: int, microbatches: int) -> None:
    for name in ("GPipe", "1F1B"):
        assert bubble(table_of(name, pp, pp, microbatches)) == pytest.approx(
            bubble_by_the_book(name, pp, microbatches), abs=1e-12
        )


def test_more_stages_a_rank_and_gradients_apart_idle_less() -> None:
    fill = bubble_by_the_book("1F1B", 4, 8)
    assert fill == pytest.approx(3 / 11)
    assert bubble_by_the_book("LoopedBFS", 4, 8) is None
    looped, zero = (bubble(table_of(name, 8, 4, 8)) for name in ("Interleaved1F1B", "ZBVZeroBubble"))
    assert zero < looped < fill
    assert looped == pytest.approx(3 / 19, abs=1e-12)  # of two stages a rank: (p - 1) / (2 m + p - 1)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            ("Gpipe", 2, 2, 4),
            'schedule "Gpipe" is none of torch\'s, expected GPipe, .* or DualPipeV; did you mean "GPipe"\\?',
        ),
        (("1F1B", 4, 2, 4), "1F1B runs one stage on each rank, but there are 4 stages on 2 ranks; expected 2 stages"),
        (
            ("ZBVZeroBubble", 2, 2, 4),
            "ZBVZeroBubble runs two stages on each rank, but .* 2 stages on 2 ranks; expected 4 stages",
        ),
        (("LoopedBFS", 3, 2, 4), "LoopedBFS runs as many stages on each rank, but .* 3 stages on 2 ranks; expected 4 stages"),
        (("1F1B", 4, 4, 3), "1F1B with 3 microbatches: it takes at least as many as there are stages, 4; use 4"),
        (("DualPipeV", 4, 2, 3), "DualPipeV with 3 microbatches: it takes at least as many as there are stages, 4; use 4"),
        (("Interleaved1F1B", 4, 2, 5), "Interleaved1F1B with 5 microbatches: it runs them in 2 rounds of 2 or more, .*; use 6"),
        (("GPipe", 2, 2, 0), "GPipe with 0 microbatches runs nothing, expected one or more"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_a_sentence(asked: tuple[str, int, int, int], sentence: str) -> None:
    with pytest.raises(StageError) as caught:
        table_of(*asked)
    assert re.fullmatch(sentence, str(caught.value))


def test_numbers_are_refused_and_tables_checked_without_torch() -> None:
    code = (
        "import sys; from pytest_fxbucket.pipeline.schedules import refuse_numbers; refuse_numbers('1F1B', 2, 2, 2); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_rooms_names_are_what_they_say() -> None:
    """No file has the name of a function, which it would hide once it is imported."""
    from pytest_fxbucket import pipeline

    assert {name for name in pipeline.__all__ if not callable(getattr(pipeline, name))} == set()
