"""What random graphs brought to light (suites/fuzz), each as the smallest graph that shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.drawing import DrawingStep
from pytest_fxbucket.fuzz.judge import judged, problems
from pytest_fxbucket.fuzz.on_ranks import compare
from pytest_fxbucket.fuzz.our_pass import run_pass
from pytest_fxbucket.fuzz.program import Program, aten
from pytest_fxbucket.fuzz.strategies import drawn
from pytest_fxbucket.fuzz.trial import PlanChoice
from pytest_fxbucket.fuzz.tried_pass import subject_of
from pytest_fxbucket.ranks.pools import Pools
from suites.passes.programs import Passed, through

Equal = Callable[..., Passed]


def changed_again(made: Program, *nodes: fx.Node, entries: Sequence[str] = ("a",)) -> bool:
    """Whether the pass changes its own output."""
    passed = through(made, made.returns(*nodes), entries)
    before = str(passed.after.graph)
    run_pass(passed.after.graph, entries)
    return str(passed.after.graph) != before


def test_a_plan_on_a_graph_that_is_bucketed_already_finds_its_buckets(made: Program) -> None:
    """Merged launches named no module, so every entry was refused the second time."""
    assert not changed_again(made, *(made.gather(p) for p in made.shards("pq")))


def test_a_gather_of_what_was_written_behind_a_pack_does_not_join_that_bucket_later(made: Program) -> None:
    """Once packed, a shard may be written before its bucket is launched: its second gather needs no bucket's result then."""
    p, q = made.shards("pq")
    first, other = made.gather(p), made.gather(q)
    made.call(aten.add_.Tensor, p, 1.0)
    assert not changed_again(made, first, other, made.gather(p))


def test_both_waits_of_a_launch_are_deferred_in_one_go(made: Program) -> None:
    """The second stood in the first one's way, and went; so the next run of the pass moved the first."""
    x, y = made.fulls("xy")
    launch = made.launch_reduce(x)
    first = made.call(aten.add_.Tensor, made.wait(launch), 1.0)
    second = made.wait(launch)
    made.module = "b"
    assert not changed_again(made, first, second, made.reduce(y), entries=["a", "b"])


def test_what_is_made_of_a_bucket_comes_behind_all_of_its_members() -> None:
    """A gradient reduced once shares a bucket with one that was not, and what is made of that comes behind both."""
    drawings = [
        *[DrawingStep("nothing")] * 5,
        DrawingStep("compute"),
        DrawingStep("all_reduce", 8),
        DrawingStep("reduce"),
        DrawingStep("reduce"),
        DrawingStep("view"),
        DrawingStep("reduce"),
        DrawingStep("cast_and_launch", 0, 0, 2),
    ]
    trial = PlanChoice(plan=0, by="size", caps=(0,), defer_reduce=True).trial(drawn(3, drawings))
    found = judged(trial, subject_of("manual"))
    assert found is None, found.text


def test_a_graph_that_reduces_an_empty_tensor_can_be_read() -> None:
    made = Program(3)
    gm = made.returns(made.reduce(made.given("p", 0, 3)))
    assert problems(made, [gm.graph] * made.world) == []


@pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce"])
def test_one_member_is_sent_on_while_another_is_written(made: Program, equal: Equal, kind: str) -> None:
    """They lie side by side once they share a bucket, and are no buffer of each other's launches."""
    x, y = made.shards("xy", made.world**2, 3)
    first, second = getattr(made, kind)(x), getattr(made, kind)(y)
    launch = getattr(made, f"launch_{kind}")(made.call(aten.view.default, first, list(first.meta["val"].shape)))
    made.call(aten.add_.Tensor, second, 1.0)
    passed = equal([made.wait(launch), second], settings=[{}])
    assert len(passed.launches) == 2
    assert problems(made, [passed.before.graph] * made.world) == []
    assert problems(made, [passed.after.graph] * made.world) == []


def sent_while_written(made: Program, written: int) -> list[fx.Node]:
    """Parts 0 and 1 of three are all-reduced, and the part ``written`` is written before they have arrived."""
    cut = made.call(aten.split_with_sizes.default, made.neg(made.given("x", 6)), [2, 2, 2])
    parts = [made.call(getitem, cut, number) for number in range(3)]
    sent = [made.launch_all_reduce(part) for part in parts[:2]]
    made.call(aten.add_.Tensor, parts[written], 1.0)
    return [*map(made.wait, sent), parts[2]]


def test_what_is_sent_is_not_changed_by_a_write_beside_it(made: Program, equal: Equal) -> None:
    """A second run left alone what the first had not, since members of one bucket lie in one storage."""
    assert equal(sent_while_written(made, 2), settings=[{}]).launches == ["all_reduce"]


def test_what_is_sent_is_changed_by_a_write_of_its_own_part(made: Program) -> None:
    assert through(made, made.returns(*sent_while_written(made, 0))).launches == ["all_reduce", "all_reduce"]


def test_one_element_of_another_stride_is_reduced_in_place_and_shares_a_launch_with_other_dtypes(pools: Pools) -> None:
    """It counts as contiguous, yet cannot be seen as bytes as it is; ranks that reduce in order do just that."""
    made = Program(3)
    one, other = (made.call(aten.select.int, made.given(name, 1, 5), 1, 2) for name in "xy")
    gathered = [made.gather(one), made.gather(*made.shards("q", dtype=torch.bfloat16))]
    passed = through(made, made.returns(*gathered, made.all_reduce_in_place(other)), dtypes="mixed")
    assert compare(pools, passed.before, passed.after, 3) == []
    assert passed.launches == ["all_gather_into_tensor", "all_reduce_"]
