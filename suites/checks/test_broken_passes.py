"""A pass that is broken on purpose turns the right item red, with words that lead to the place.

What a promise says of a reading is in `test_audit.py`, what a golden says of a schedule in `suites/golden`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.checks.bitwise import check
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.ranks.pools import Pools
from suites.checks.small_llama import SmallLlama, make_project

ROOT = Path(__file__).parents[2]
CHECKS = ("audit", "golden", "collectives", "same", "bitwise", "eager")
RANKS = 2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> SmallLlama:
    made = SmallLlama.make(tmp_path_factory.mktemp("llama"), pools, RANKS)
    assert made.run("manual", accept="new").check("golden")
    return made


def said(verdict: Verdict) -> str:
    """What a verdict that is red says."""
    assert verdict.outcome == "failed"
    return "\n".join([verdict.summary, *verdict.lines])


STATIC = {
    ("dropped_wait", "collectives"): [
        ") is never waited for",
        "is read by aten.view.default (view_",
        ") without waiting for it",
    ],
    ("two_waits", "collectives"): ["(all_gather_into_tensor) is waited for 2 times, expected once"],
    ("swapped_in_pack", "audit"): [
        "entry layers.0, forward all_gather: member 1 of the layout is layers.0.attention.wv.weight, "
        "expected layers.0.attention.wk.weight",
        "forward compute uses layers.0.attention.wv.weight where it used layers.0.attention.wk.weight",
    ],
    ("swapped_in_unpack", "audit"): [
        "forward compute uses layers.0.attention.wv.weight where it used layers.0.attention.wk.weight before the pass"
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
    ("late_first_launch_of_backward", "audit"): [
        "entry layers.1, backward all_gather is launched after the start of norm+output's compute: prefetch = 1 is not reached"
    ],
    ("half_early_wait", "audit"): [
        "entry layers.1, forward all_gather is waited for before layers.0 computes, which used to hide it: it is exposed"
    ],
    ("early_waits_behind_dummy_readers", "audit"): [
        "entry layers.0, forward all_gather is waited for before tok_embeddings computes"
    ],
    ("other_layout_on_last_rank", "audit"): ["rank 1: entry layers.1, backward reduce_scatter: member 1 of the layout"],
    ("extra_launch_on_last_rank", "collectives"): ["rank 1 launches all_reduce (all_reduce_default) sum float32 1024"],
    ("low_precision_in_one_gather", "audit"): [
        "forward all_gather of layers.1.attention.wk.weight is squeezed through bfloat16 on its way, expected float32"
    ],
    ("backward_reads_forward_gathers", "audit"): [
        "entry layers.1, backward all_gather: layers.1.attention.wq.weight, layers.1.attention.wk.weight, ",
        "reshard_after_forward is true there, but backward reads forward's gather of layers.1.attention.wq.weight",
    ],
    ("padded_reduction", "audit"): ["and 6 more moves 98816 bytes, its members have 49408"],
    ("launch_without_overload", "collectives"): ["calls _c10d_functional::all_reduce without naming an overload"],
    ("wrong_group_size", "collectives"): ["says that its group has 3 ranks, but it has 2"],
    ("pack_overwritten", "collectives"): [
        "aten.zero_.default (zero__default) writes to a buffer of",
        "_c10d_functional.all_gather_into_tensor.default (",
        ") before its wait",
    ],
    ("lying_values", "audit"): ["the gradient returned for layers.1.attention.wq.weight is not one whole piece of a reduction"],
}


@pytest.mark.parametrize(("name", "check"), STATIC)
def test_the_graph_alone_shows_where_a_pass_went_wrong(llama: SmallLlama, name: str, check: str) -> None:
    verdict = llama.run(f"broken_passes:{name}").check(check)
    for words in STATIC[name, check]:
        assert words in said(verdict)
    assert verdict.folder is not None
    assert (verdict.folder / "joint.unbucketed.txt").exists()
    assert (verdict.folder / "joint.bucketed.rank0.txt").exists()


BITWISE = {
    "shifted_split": [r"first node whose bits differ: mul_1 \(aten\.mul\.Tensor\), node \d+ of the bucketed graph, on rank 0"],
    "other_compute": [
        r"gradient tok_embeddings\.weight \(bucket tok_embeddings\)",
        r"first node whose bits differ: \w+ \(aten\S+\), node \d+ of the bucketed graph, on rank 0, 1",
    ],
}


@pytest.mark.parametrize("name", BITWISE)
def test_ranks_show_that_the_program_is_another(llama: SmallLlama, name: str) -> None:
    words = said(llama.run(f"broken_passes:{name}").check("bitwise"))
    for pattern in BITWISE[name]:
        assert re.search(pattern, words), words


def test_what_is_wrong_on_one_rank_is_red_wherever_values_count_and_only_there(llama: SmallLlama) -> None:
    run = llama.run("broken_passes:wrong_on_last_rank")
    verdicts = {check: run.check(check) for check in CHECKS}
    assert {check for check, verdict in verdicts.items() if not verdict} == {"audit", "same", "bitwise", "eager"}
    assert "rank 1: backward compute uses layers.1.attention.w" in said(verdicts["audit"])
    of = r"gradient layers\.1\.attention\.wk\.weight \(bucket layers\.1\)"
    assert re.search(rf"step 0, rank 1: {of}: \d+ of 256 elements differ, up to", said(verdicts["bitwise"]))
    assert "the difference arises in nodes that the pass made" in said(verdicts["bitwise"])


def test_ranks_that_would_hang_are_not_waited_for(llama: SmallLlama) -> None:
    run = llama.run("broken_passes:other_order_on_last_rank")
    golden = said(run.check("golden"))
    assert "rank 1 is not that of rank 0" in golden
    assert " swapped: " in golden
    found = run.check("collectives")
    first = found.lines[0]
    assert first.startswith("collective 1 on ranks 0,1 differs: rank 0 launches all_gather_into_tensor")
    assert "rank 1 launches all_gather_into_tensor" in first
    on_ranks = ("bitwise", "eager", "benchmark")
    for verdict in map(run.check, on_ranks):
        assert verdict.outcome == "skipped"
        assert verdict.summary.startswith(f"not run, since its ranks would hang, as collectives finds: {first}")
    run.plan = replace(run.plan, checks=replace(run.plan.checks, collectives=False))
    for verdict in map(run.check, on_ranks):
        assert verdict.outcome == "failed"
        assert verdict.summary.endswith("for which its ranks would hang, so they were not run")
        assert verdict.lines[0] == first


RAISED = {
    "raises": r"pass broken_passes:raises raised KeyError at \S*broken_passes.py:\d+ in raises: "
    r"'no such module as layers.9'",
    "returns_none": "returned a NoneType, expected a GraphModule",
    "wrong_split": r"aten\.view\.default \(\w+\) of \w+: shape '\[32, 32\]' is invalid for input of size 512",
    "stale_values": r"is wrong: slice_tensor says torch\.float32 \(2, \d+\), and aten\.slice\.Tensor gives torch\.float32 \(1,",
    "one_more_output": r"returned a graph with 23 outputs, expected 22",
}


@pytest.mark.parametrize("name", RAISED)
def test_a_graph_that_cannot_be_had_or_run_is_one_sentence_for_every_item(llama: SmallLlama, name: str) -> None:
    run = llama.run(f"broken_passes:{name}")
    for item in ("audit", "eager"):
        with pytest.raises(FxbucketError, match=RAISED[name]) as caught:
            run.check(item)
        assert "\n" not in str(caught.value)
    assert run.summary() is None


@pytest.mark.parametrize("name", ["without_metadata", "without_values"])
def test_a_good_pass_of_somebody_else_is_green_whatever_it_says_of_itself(name: str, llama: SmallLlama) -> None:
    run = llama.run(f"broken_passes:{name}")
    verdicts = [run.check(check) for check in CHECKS]
    assert all(verdicts), verdicts


@pytest.mark.usefixtures("warm")
def test_a_broken_pass_gives_exit_code_1_and_leaves_the_golden_alone(
    llama: SmallLlama, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_project(pytester.path, RANKS)
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
    for rank in range(RANKS):
        assert f"rank {rank} ran another graph than the one that was checked" in said(verdict)
    assert "differ" not in said(verdict)
