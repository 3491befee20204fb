"""Passes that are right as long as they are looked at: each is named by a check, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Entry, Overlap
from pytest_fxbucket.plan.schema_checks import Checks, Run
from pytest_fxbucket.plan.schema_model import Model, Parallel, Pipeline, Step
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.checks.conftest import PLAN as MLP
from suites.passes import adversaries

OF_MLP = "suites.checks.bitwise_models"
PLAN = replace(
    MLP,
    path=Path(__file__).parents[2] / "adversaries.toml",
    model=Model(f"{OF_MLP}:build", f"{OF_MLP}:batch", {}, f"{OF_MLP}:loss"),
    checks=Checks(golden=False),
)
STAGES = replace(PLAN, parallel=Parallel(dp_shard=2, pp=2), pipeline=Pipeline(cuts=("up",)), step=Step(microbatches=3))
AGAIN = replace(
    load_plans(PLAN.path.with_name("fixtures") / "plans/checkpoint.toml")[0],
    parallel=Parallel(dp_shard=2),
    run=Run(),
    checks=Checks(golden=False),
)
CP, TP, MICROBATCHES = (
    replace(load_plans(PLAN.path.with_name("fixtures") / f"plans/{name}.toml")[0], checks=Checks(golden=False))
    for name in ("cp", "tp", "microbatches")
)
ORDERED = replace(PLAN, overlap=Overlap(insert_overlap_deps=True))
_PLACED = load_plans(PLAN.path.with_name("fixtures") / "plans/placed.toml")[0]
PLACED = replace(
    _PLACED,
    bucket=replace(_PLACED.bucket, plan=(Entry("both", ("layers.0", "layers.1")),), layout="execution"),
    checks=Checks(golden=False),
)
Ran = Callable[..., PlanRun]


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A pass behind the plan's step, which is captured once."""
    folder = tmp_path_factory.mktemp("adversaries")
    captured = {
        id(plan): PlanOnMesh(CapturedPlan(plan, mesh_of(plan), print), "manual")
        for plan in (PLAN, STAGES, ORDERED, AGAIN, CP, TP, MICROBATCHES, PLACED)
    }

    def run(name: str, plan: Plan = PLAN) -> PlanRun:
        name = f"{adversaries.__name__}:{name}"
        made = PlanRun(plan, RunSettings(PLAN.path.parent, folder, folder / "artifacts", name), pools)
        made.__dict__["_mesh_world"] = captured[id(plan)].by_pass(name)
        return made

    return run


def green(ran: Ran, name: str) -> str:
    """What the check same says of a pass that all checks find right."""
    run = ran(name)
    verdicts: list[Verdict] = [run.check(check) for check in ("audit", "collectives", "same")]
    assert all(verdicts), verdicts
    return verdicts[-1].summary


def test_a_right_pass_is_green_and_nothing_is_said_of_it(ran: Ran) -> None:
    assert "the pass" not in green(ran, "right")


def test_a_pass_may_go_by_variables_that_only_begin_like_those_of_runners(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIFAR_ROOT", "/data")
    monkeypatch.setenv("CI", "true")
    assert "the pass" not in green(ran, "by_an_own_variable")


@pytest.mark.parametrize("rank", [None, "0", "3", "abc"])
def test_a_pass_may_ask_for_its_rank(ran: Ran, monkeypatch: pytest.MonkeyPatch, rank: str | None) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "1" if rank == "0" else "4")
    assert "the pass" not in green(ran, "asks_for_its_rank" if rank != "abc" else "right")


def test_each_stage_is_held_against_what_its_own_graph_said(ran: Ran) -> None:
    said = ran("other_values", STAGES).check("audit").lines
    assert any('what nodes say of their meta["val"] is wrong' in line and line.startswith("rank 2, 3: ") for line in said)
    for name in ("right", "retraced"):  # whose inputs have other names
        said = ran(name, STAGES).check("audit").lines
        assert not any("what nodes say of" in line for line in said), name


def test_merging_by_torch_which_moves_compute_is_right(ran: Ran) -> None:
    run = ran("merged_by_torch", PLACED)
    assert [verdict.lines for check in ("audit", "collectives", "same") if not (verdict := run.check(check))] == []
    assert "two members are swapped" in "\n".join(ran("merged_by_torch_and_swapped", PLACED).check("audit").lines)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("by_names", "the pass makes another graph where nodes have other names"),
        ("after_many_calls", "the pass keeps counts from call to call"),
        ("after_many_calls_of_a_kind", "the pass keeps by_kind from call to call"),
        ("by_chance", "the pass draws random numbers"),
        (
            "leaves_an_operator_that_is_made_of_others",
            "adversaries_own.same_as.default taken for what it is made of as it is traced",
        ),
        ("writes_other_code", "has code that is changed when it is generated: the graph is what is compared and run"),
        ("is_called_otherwise", "has a call that is not its graph's: the graph is what is compared and run"),
        ("is_compiled_otherwise", "has a call that is not its graph's: the graph is what is compared and run"),
        ("has_code_for_a_name", "has code in the name of a node, 'addmm = 0; addmm': the graph is what is compared"),
        ("counted_anew", "the pass counts names anew: nodes are called here as before it"),
        ("leaves_a_hook", "has hooks, which run later in Python: the graph is what is compared and run"),
    ],
)
def test_what_a_pass_goes_by_beside_the_graph_is_named(name: str, words: str, ran: Ran) -> None:
    assert words in green(ran, name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "by_environment",
            r"another graph of the same one where no variable of the environment is CI or begins with PYTEST_",
        ),
        (
            "by_the_rank_of_the_environment",
            r"another graph of the same one where RANK and LOCAL_RANK in the environment say another",
        ),
        ("by_its_arguments", r"another graph of the same one where sys.argv is another"),
        (
            "by_two_things_at_once",
            r"another graph of the same one only where all of this is so: .*; where pytest is not imported",
        ),
        ("raises_where_names_are_others", r"raised AssertionError at .*: no such node"),
        ("raises_elsewhere", r"raised ValueError at .*: not here, where sys.argv is another"),
        ("by_what_is_imported", r"another graph of the same one where pytest is not imported"),
        ("every_other_time", r"makes another graph of the same one when it is called again"),
        ("leaves_a_function", rf"lets the graph call {adversaries.__name__}.later at later, .* register it as an operator"),
    ],
)
def test_a_pass_that_may_do_another_thing_elsewhere_is_refused(
    name: str, sentence: str, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(adversaries.counts, "calls", 0)
    with pytest.raises(PassError, match=sentence):
        ran(name).check("audit")


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("only_marks", "audit", "launches, expected 1"),
        ("other_modules", "audit", "what nodes say of their module is wrong, which compilers and readers go by: "),
        ("other_modules_in_place", "audit", "what nodes say of their module is wrong, which compilers and readers go by: "),
        ("other_values", "audit", 'what nodes say of their meta["val"] is wrong, which compilers and readers go by: '),
        ("other_values_in_lists", "audit", "[0] says torch.float64 (2, "),
        (
            "gathers_what_nobody_reads",
            "audit",
            "backward all_gather of up.weight, up.bias is new: there was none before the pass",
        ),
        ("keeps_what_was_gathered", "audit", "gathered bytes alive"),
        ("computes_twice_and_says_a_number", "same", "is computed 2 times, expected 1 as before the pass"),
        ("computes_twice_and_says_a_number", "audit", "says a number, and aten.addmm.default gives torch.float32"),
        ("turns_what_it_says_of_memory", "audit", " of strides (1, "),
        (
            "writes_what_is_sent_through_an_alias",
            "collectives",
            "writes to a buffer of _c10d_functional.all_gather_into_tensor",
        ),
        ("returns_another_by_name", "same", "the gradient of "),
        ("writes_in_flight_by_name", "collectives", "writes to a buffer of _c10d_functional.all_gather_into_tensor"),
        ("says_otherwise_on_rank_1", "audit", 'rank 1: what nodes say of their meta["val"] is wrong'),
        ("waits_for_reductions_at_the_end", "audit", "reduce_scatter is waited for only after up launches its reduction"),
        ("counted_anew_with_other_modules", "audit", "what nodes say of their module is wrong"),
        ("leaves_an_operator", "same", "adversaries::later"),
        ("changes_what_it_gave", "audit", "reduces by sum, expected avg"),
    ],
)
def test_a_pass_that_says_what_is_not_so_is_red(name: str, check: str, words: str, ran: Ran) -> None:
    verdict = ran(name).check(check)
    assert verdict.outcome == "failed"
    assert words in "\n".join(verdict.lines)


def test_a_checkpoint_that_is_undone_is_told_by_what_is_kept_and_not_by_names(ran: Ran) -> None:
    (line, *_) = ran("keeps_what_is_computed_again", AGAIN).check("audit").lines
    assert re.match(r"computed values hold up to [\d,]+ bytes at once, [\d,]+ before the pass: what \[step\] checkpoint", line)
    for name in ("right", "retraced"):
        assert ran(name, AGAIN).check("audit"), name


def test_what_a_pass_does_not_say_is_told_by_operators(ran: Ran) -> None:
    """Else a launch without a value would send nothing, and cost nothing, where time and memory are estimated."""
    for name in ("right", "says_nothing"):
        graph = ran(name)._mesh_world.passed(0)["joint"].bucketed.graph
        sizes = [node.meta["val"].numel() for node in graph.nodes if launch_kind(node)]
        assert len(sizes) == 7, sizes


def test_a_pass_that_leaves_no_edge_for_the_order_that_a_plan_asks_for_is_red(ran: Ran) -> None:
    verdict = ran("right", ORDERED).check("audit")
    assert verdict.lines == (
        "insert_overlap_deps = true, but the graph has no edge that keeps the order of launches and waits",
    )


@pytest.mark.parametrize("name", ["changes_what_it_got", "takes_its_list", "retraced", "transformed"])
def test_a_pass_may_spoil_what_it_got_and_trace_the_graph_again(name: str, ran: Ran) -> None:
    assert green(ran, name)


@pytest.mark.parametrize(
    ("name", "plan"),
    [("counted_anew", CP), ("retraced", CP), ("counted_anew", TP), ("right", MICROBATCHES)],
    ids=["copied under cp", "traced again under cp", "copied under tp", "in microbatches"],
)
def test_our_pass_by_modules_keeps_all_promises_also_where_names_are_counted_anew(name: str, plan: Plan, ran: Ran) -> None:
    """The model assembles gradients under cp, and reduces activations under tp: no name tells which nodes these are.

    In microbatches compute starts several times, which our pass tells by launches alone.
    """
    verdict = ran(name, plan).check("audit")
    assert verdict, verdict.lines
