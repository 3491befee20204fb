"""A pass that changes more than buckets: what audit leaves out it names, and all other checks hold in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.plans.llama import llama

HERE = Path(__file__).parent
PLAN = (
    llama("layers = 1, dim = 32, heads = 2")
    + """
[cluster]
preset = "h100-sxm"

[checks]
memory = { peak_max_gb = 1 }

[run]
steps = 1
timeout_s = 60

[[matrix]]
id = "tp"
parallel.tp = 2

[matrix.parallel.tp_plan]
"layers.*.feed_forward.w1" = "colwise"
"layers.*.feed_forward.w3" = "colwise"
"layers.*.feed_forward.w2" = "rowwise"
"""
)
Asked = Callable[..., Verdict]
LEFT = "(left out, since no plan speaks of it: "


@pytest.fixture(scope="module")
def asked(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A check of the plan, or of its row on tensor parallel ranks, behind our pass and others; captured once each."""
    folder = tmp_path_factory.mktemp("any")
    plans = {plan.matrix_id: plan for plan in parse_plans(PLAN, HERE / "any.toml")}
    worlds = {row: PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual") for row, plan in plans.items()}

    def run(check: str, *passes: str, row: str | None = None, peak_max_gb: float | None = None) -> Verdict:
        plan = plans[row]
        if peak_max_gb is not None:
            limits = replace(plan.checks.memory or pytest.fail("it has limits"), peak_max_gb=peak_max_gb)
            plan = replace(plan, checks=replace(plan.checks, memory=limits))
        name = ",".join(one if one == "manual" else f"any_passes:{one}" for one in passes)
        made = PlanRun(plan, RunSettings(HERE, folder / "golden", folder / "artifacts", name), pools)
        made.__dict__["_mesh_world"] = worlds[row].by_pass(name)
        return made.check(check)

    return run


NAMED = {
    "recomputed": ["computed again rsqrt of layers.0.attention_norm", "silu of layers.0.feed_forward"],
    "offloaded": ["added 2 _to_copy of layers.0.attention_norm", "2 _to_copy of layers.0.feed_forward"],
    "chunked": ["added 2 slice of layers.0.attention.wq, 2 mm of ", "taken out mm of layers.0.attention.wq"],
}


@pytest.mark.parametrize("name", NAMED)
def test_what_audit_does_not_understand_it_names_and_is_not_red_of(asked: Asked, name: str) -> None:
    for passes in (("manual", name), (name, "manual")):
        verdict = asked("audit", *passes)
        assert verdict, repr(verdict)
        assert LEFT in verdict.summary
        for words in NAMED[name]:
            assert words in verdict.summary


def test_several_such_passes_around_the_one_that_buckets_keep_all_promises_and_bits(asked: Asked) -> None:
    for check in ("audit", "bitwise", "eager"):
        verdict = asked(check, "chunked", "offloaded", "manual", "recomputed")
        assert verdict, repr(verdict)


def test_the_bits_tell_which_pass_is_broken(asked: Asked) -> None:
    verdict = asked("bitwise", "manual", "broken_offloaded")
    assert verdict.outcome == "failed"
    assert "is number 2, any_passes:broken_offloaded;" in verdict.lines[-1]


def test_memory_tells_what_recomputation_saves(asked: Asked) -> None:
    without, saved = (float(asked("memory", *passes).summary.split()[1]) for passes in (("manual",), ("manual", "recomputed")))
    assert saved < without
    between = (saved + without) / 2
    assert asked("memory", "manual", "recomputed", peak_max_gb=between)
    assert asked("memory", "manual", peak_max_gb=between).outcome == "failed"


def test_a_promise_that_is_broken_beside_is_still_found(asked: Asked) -> None:
    verdict = asked("audit", "manual", "recomputed", "other_operation")
    assert verdict.outcome == "failed"
    assert "layers.0.attention.wv.weight and 6 more reduces by sum, expected avg" in verdict.lines[0]
    assert any(line.startswith("left out, since no plan speaks of it: computed again") for line in verdict.lines)
    assert "is number 3, any_passes:other_operation;" in verdict.lines[-1]


def test_compute_that_stayed_reads_and_makes_what_it_did(asked: Asked) -> None:
    verdict = asked("audit", "manual", "recomputed", "scaled_gradient")
    assert verdict.outcome == "failed"
    assert "backward compute uses tok_embeddings.weight never, once before the pass" in verdict.lines


def test_what_a_pass_did_beside_is_told_also_where_another_names_everything_anew(asked: Asked) -> None:
    assert asked("audit", "manual", "named_anew").summary == asked("audit", "manual").summary
    verdict = asked("audit", "manual", "chunked", "named_anew")
    assert verdict, repr(verdict)
    for words in (LEFT, *NAMED["chunked"]):
        assert words in verdict.summary


def test_sums_of_activations_in_two_parts_are_as_good_as_in_one(asked: Asked) -> None:
    passes = ("manual", "parted_reductions")
    verdict = asked("audit", *passes, row="tp")
    assert verdict, repr(verdict)
    assert f"{LEFT}all_reduce sum in float32 on group mesh_tp of no parameter in 6 launches, 3 before the pass)" in repr(
        verdict
    )
    assert asked("collectives", *passes, row="tp")
    assert asked("bitwise", *passes, row="tp")
