"""A pass that is broken on purpose turns the right item red, with words that lead to the place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.checks.bitwise import check
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from suites.checks.small_llama import SmallLlama, make_project

ROOT = Path(__file__).parents[2]
CHECKS = ("audit", "golden", "collectives", "same", "bitwise", "eager")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> SmallLlama:
    made = SmallLlama.make(tmp_path_factory.mktemp("llama"), pools)
    assert made.run("manual", accept="new").check("golden")
    return made


@pytest.fixture(scope="module")
def runs() -> dict[str, PlanRun]:
    return {}


def verdict_of(llama: SmallLlama, runs: dict[str, PlanRun], name: str, check: str) -> Verdict:
    if name not in runs:
        runs[name] = llama.run(f"broken_passes:{name}")
    return runs[name].check(check)


STATIC = {
    ("dropped_wait", "collectives"): [
        ") is never waited for",
        "is read by aten.view.default (view_",
        ") without waiting for it",
    ],
    ("dropped_wait", "golden"): ["forward: wait all_gather layers.0 is gone"],
    ("two_waits", "collectives"): ["(all_gather_into_tensor) is waited for 2 times, expected once"],
    ("swapped_in_pack", "audit"): [
        "entry layers.0, forward all_gather: member 1 of the layout is layers.0.attention.wv.weight, "
        "expected layers.0.attention.wk.weight",
        "forward compute uses layers.0.attention.wv.weight where it used layers.0.attention.wk.weight",
    ],
    ("swapped_in_unpack", "audit"): [
        "forward compute uses layers.0.attention.wv.weight where it used layers.0.attention.wk.weight before the pass"
    ],
    ("swapped_in_both", "audit"): [
        "entry layers.0, forward all_gather: member 1 of the layout is layers.0.attention.wv.weight, "
        "expected layers.0.attention.wk.weight (registration order)"
    ],
    ("swapped_in_both", "golden"): [
        "byte layout of forward all_gather layers.0 changed: layers.0.attention.wv.weight stands where "
        "layers.0.attention.wk.weight stood"
    ],
    ("swapped_in_reduction", "audit"): ["entry layers.1, backward reduce_scatter: member 1 of the layout"],
    ("swapped_gradients", "audit"): ["entry layers.0, backward reduce_scatter: member 1 of the layout"],
    ("shifted_split", "audit"): [
        "aten.mul.Tensor (mul_1) reads gathered bytes that are no parameter in its order: "
        "layers.0.feed_forward.w3.weight, layers.0.attention_norm.weight"
    ],
    ("late_launch", "audit"): [
        "entry layers.1, forward all_gather is launched after the wait for layers.0: prefetch = 1 is not reached"
    ],
    ("late_first_launch_of_backward", "audit"): [
        "entry layers.1, backward all_gather is launched after the start of norm+output's compute: prefetch = 1 is not reached"
    ],
    ("late_launch", "golden"): ["forward: launch all_gather layers.1 moved later past wait all_gather layers.0"],
    ("early_launch", "audit"): [
        "entry norm+output, forward all_gather is launched before the wait for layers.0: earlier than prefetch = 1",
        "forward compute of tok_embeddings has ",
        "gathered bytes alive, ",
    ],
    ("early_wait", "audit"): [
        "entry layers.1, forward all_gather is waited for before layers.0 computes, which used to hide it: it is exposed"
    ],
    ("half_early_wait", "audit"): ["entry layers.1, forward all_gather is waited for before layers.0 computes"],
    ("early_waits_behind_dummy_readers", "audit"): [
        "entry layers.0, forward all_gather is waited for before tok_embeddings computes"
    ],
    ("early_reduction_wait", "audit"): [
        "entry norm+output, backward reduce_scatter is waited for before layers.1 launches its reduction: it is not deferred"
    ],
    ("other_order_on_last_rank", "collectives"): [
        "collective 1 on ranks 0-3 differs: rank 0 launches all_gather_into_tensor",
        "rank 3 launches all_gather_into_tensor",
    ],
    ("other_order_on_last_rank", "golden"): ["rank 3 is not that of rank 0", " swapped: "],
    ("other_layout_on_last_rank", "audit"): ["rank 3: entry layers.1, backward reduce_scatter: member 1 of the layout"],
    ("extra_launch_on_last_rank", "collectives"): ["rank 3 launches all_reduce (all_reduce_default) sum float32 1024"],
    ("low_precision_in_one_gather", "audit"): [
        "forward all_gather of layers.1.attention.wk.weight is squeezed through bfloat16 on its way, expected float32"
    ],
    ("low_precision_reduction", "audit"): [
        "backward reduce_scatter of layers.1.attention.wq.weight, ",
        "is launched in bfloat16, expected float32",
    ],
    ("low_precision_reduction", "golden"): ["dtype of backward reduce_scatter layers.1 changed: float32 -> bfloat16"],
    ("does_nothing", "audit"): ["entry layers.0, forward all_gather: 9 launches, expected 1"],
    ("nothing_but_marks", "audit"): ["entry layers.0, forward all_gather: 9 launches, expected 1"],
    ("only_buckets", "audit"): [
        "entry layers.1, forward all_gather is launched after the wait for layers.0: prefetch = 1 is not reached",
        "entry layers.1, backward reduce_scatter is waited for before layers.0 launches its reduction",
    ],
    ("backward_reads_forward_gathers", "audit"): [
        "entry layers.1, backward all_gather: layers.1.attention.wq.weight, layers.1.attention.wk.weight, ",
        "reshard_after_forward is true there, but backward reads forward's gather of layers.1.attention.wq.weight",
    ],
    ("bucket_in_two", "audit"): ["entry layers.0, backward reduce_scatter: 2 launches, expected 1"],
    ("foreign_member", "audit"): [
        "entry layers.1, forward all_gather: its launch also carries norm.weight of norm+output",
    ],
    ("member_left_out", "audit"): ["entry norm+output, forward all_gather: 2 launches, expected 1"],
    ("sum_for_avg", "audit"): ["layers.1.attention.wv.weight and 6 more reduces by sum, expected avg"],
    ("sum_for_avg", "golden"): ["reduction of backward reduce_scatter layers.1 changed: avg -> sum"],
    ("padded_reduction", "audit"): ["and 6 more moves 98816 bytes, its members have 49408"],
    ("extra_launch", "audit"): ["all_reduce sum of 1024 elements in float32 of no parameter is launched once, never before"],
    ("launch_without_overload", "collectives"): ["calls _c10d_functional::all_reduce without naming an overload"],
    ("wrong_group_size", "collectives"): ["says that its group has 2 ranks, but it has 4"],
    ("pack_overwritten", "collectives"): [
        "aten.zero_.default (zero__default) writes to a buffer of",
        "_c10d_functional.all_gather_into_tensor.default (",
        ") before its wait",
    ],
    ("wrong_on_last_rank", "audit"): ["rank 3: backward compute uses layers.1.attention.w"],
    ("lying_values", "audit"): ["the gradient returned for layers.1.attention.wq.weight is not one whole piece of a reduction"],
}


@pytest.mark.parametrize(("name", "check"), STATIC)
def test_the_graph_alone_shows_where_a_pass_went_wrong(
    llama: SmallLlama, runs: dict[str, PlanRun], name: str, check: str
) -> None:
    verdict = verdict_of(llama, runs, name, check)
    assert verdict.outcome == "failed"
    said = "\n".join([verdict.summary, *verdict.lines])
    for words in STATIC[name, check]:
        assert words in said
    assert verdict.folder is not None
    assert (verdict.folder / "joint.unbucketed.txt").exists()
    assert (verdict.folder / "joint.bucketed.rank0.txt").exists()


BITWISE = {
    "shifted_split": [r"first node whose bits differ: mul_1 \(aten\.mul\.Tensor\), node \d+ of the bucketed graph, on rank 0"],
    "wrong_on_last_rank": [
        r"step 0, rank 3: gradient layers\.1\.attention\.wk\.weight \(bucket layers\.1\): \d+ of 128 elements differ, up to",
        r"the difference arises in nodes that the pass made",
    ],
    "low_precision_in_one_gather": [
        r"step 0, rank 0: loss: 1 of 1 elements differ, up to \d+ ULP",
        r"first node whose bits differ: \w+ \(aten\S+\), node \d+ of the bucketed graph, on rank 0, 1, 2, 3",
    ],
    "other_compute": [r"gradient tok_embeddings\.weight \(bucket tok_embeddings\)", r"first node whose bits differ: \w+ \("],
}


@pytest.mark.parametrize("name", BITWISE)
def test_ranks_show_that_the_program_is_another(llama: SmallLlama, runs: dict[str, PlanRun], name: str) -> None:
    verdict = verdict_of(llama, runs, name, "bitwise")
    assert verdict.outcome == "failed"
    said = "\n".join([verdict.summary, *verdict.lines])
    for pattern in BITWISE[name]:
        assert re.search(pattern, said), said


@pytest.mark.parametrize("check", ["bitwise", "eager", "benchmark"])
@pytest.mark.parametrize("name", ["other_order_on_last_rank", "extra_launch_on_last_rank"])
def test_ranks_that_would_hang_are_not_waited_for(llama: SmallLlama, runs: dict[str, PlanRun], name: str, check: str) -> None:
    verdict = verdict_of(llama, runs, name, check)
    first = verdict_of(llama, runs, name, "collectives").lines[0]
    assert verdict.outcome == "skipped"
    assert verdict.summary.startswith(f"not run, since its ranks would hang, as collectives finds: {first}")


@pytest.mark.parametrize("check", ["bitwise", "eager", "benchmark"])
def test_ranks_that_would_hang_are_a_failure_where_collectives_is_off(llama: SmallLlama, check: str) -> None:
    run = llama.run("broken_passes:other_order_on_last_rank")
    run.plan = replace(run.plan, checks=replace(run.plan.checks, collectives=False))
    verdict = run.check(check)
    assert verdict.outcome == "failed"
    assert verdict.summary.endswith("for which its ranks would hang, so they were not run")
    assert verdict.lines[0].startswith("collective 1 on ranks 0-3 differs: rank 0 launches all_gather_into_tensor")


RAISED = {
    "raises": r"pass broken_passes:raises raised KeyError at \S*broken_passes.py:\d+ in raises: "
    r"'no such module as layers.9'",
    "returns_none": "returned a NoneType, expected a GraphModule",
    "wrong_split": r"aten\.view\.default \(\w+\) of \w+: shape '\[32, 32\]' is invalid for input of size 512",
    "without_values": r"carries no fake value",
    "stale_values": r"is wrong: slice_tensor says torch\.float32 \(4, \d+\), and aten\.slice\.Tensor gives torch\.float32 \(2,",
    "one_more_output": r"returned a graph with 23 outputs, expected 22",
}


@pytest.mark.parametrize("check", ["audit", "eager"])
@pytest.mark.parametrize("name", RAISED)
def test_a_graph_that_cannot_be_had_or_run_is_one_sentence_for_every_item(
    llama: SmallLlama, runs: dict[str, PlanRun], name: str, check: str
) -> None:
    with pytest.raises(FxbucketError, match=RAISED[name]) as caught:
        verdict_of(llama, runs, name, check)
    assert "\n" not in str(caught.value)
    assert runs[name].summary() is None


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["good", "without_metadata"])
def test_a_good_pass_of_somebody_else_is_green_whatever_it_says_of_itself(
    llama: SmallLlama, runs: dict[str, PlanRun], name: str, check: str
) -> None:
    verdict = verdict_of(llama, runs, name, check)
    assert verdict, repr(verdict)


@pytest.mark.parametrize(
    ("name", "red"), [("swapped_in_both", {"audit", "golden"}), ("wrong_on_last_rank", {"audit", "same", "bitwise", "eager"})]
)
def test_a_broken_pass_is_red_where_it_breaks_what_is_looked_at_and_only_there(
    llama: SmallLlama, runs: dict[str, PlanRun], name: str, red: set[str]
) -> None:
    assert {check for check in CHECKS if not verdict_of(llama, runs, name, check)} == red


@pytest.mark.usefixtures("warm")
def test_a_broken_pass_gives_exit_code_1_and_leaves_the_golden_alone(
    llama: SmallLlama, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_project(pytester.path)
    path.write_text(path.read_text() + "[checks]\nbitwise = false\neager = false\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\n")
    golden = pytester.path / "golden" / "small.txt"
    golden.parent.mkdir()
    text = (llama.plan.path.parent / "golden" / "small.txt").read_bytes()
    golden.write_bytes(text)
    result = pytester.runpytest_subprocess(
        "--fxbucket-plans=small.toml", "--fxbucket-pass=broken_passes:swapped_in_both", "-rA"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*member 1 of the layout is layers.0.attention.wv.weight*"])
    assert {check for check in CHECKS if re.search(rf"^FAILED .*::{check}\b", result.stdout.str(), re.M)} == {"audit", "golden"}
    assert golden.read_bytes() == text
    assert [path.name for path in golden.parent.iterdir()] == ["small.txt"]


def test_ranks_that_read_both_graphs_wrongly_ran_others_than_those_checked(
    llama: SmallLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_JOB", "suites.checks.wrong_decode:run")
    verdict = llama.run("manual").check("bitwise")
    assert verdict.outcome == "failed"
    said = "\n".join([verdict.summary, *verdict.lines])
    assert all(f"rank {rank} ran another graph than the one that was checked" in said for rank in range(4))
    assert "differ" not in said
