"""Classes that are built on: the page's three through their plans' checks on ranks, and hooks that ask for what cannot be."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.cost.costs import Roofline
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.fuzz.our_pass import CLUSTER
from pytest_fxbucket.fuzz.program import copied
from pytest_fxbucket.passes import Bucketer, Scheduler, manual_overlap_bucketing, schedule_overlap_bucketing
from pytest_fxbucket.passes.auto.estimates import Estimates
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.merge import Merged
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.scheduler import Pair
from pytest_fxbucket.passes.targets import MergeTarget, by_size
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.portable import encode_module
from suites.docs.blocks import ROOT, of
from suites.passes.programs import chain, launches

PLANS = ROOT / "fixtures" / "plans"
BACKWARD = '\n[overlap]\ngather_group = "backward"\n'
EXAMPLES = {
    "experts_first": (PLANS / "moe.toml").read_text(encoding="utf-8"),
    "joining": (PLANS / "hybrid.toml").read_text(encoding="utf-8"),
    "each_direction": (PLANS / "moe.toml").read_text(encoding="utf-8").partition("[[matrix]]")[0] + BACKWARD,
}
CHECKS = ("audit", "collectives", "same", "bitwise")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files in a folder."""
    monkeypatch.syspath_prepend(tmp_path)
    for block in of("python"):
        if block.page == "docs/howto/build-on.md" and block.file:
            assert len(block.text.splitlines()) <= 30
            (tmp_path / block.file).parent.mkdir(exist_ok=True)
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mytrainer"]:
        del sys.modules[name]


_CAPTURED: dict[str, CapturedPlan] = {}
"""The first plan of each model, whose step the others are bucketed plans of."""


def run_of(project: Path, pools: Pools, name: str, text: str) -> PlanRun:
    path = project / "plan.toml"
    path.write_text(text, encoding="utf-8")
    settings = RunSettings(project, project / "golden", project / "artifacts", f"mytrainer.{name}:{name}")
    plan = load_plans(path)[0]
    run = PlanRun(plan, settings, pools)
    captured = _CAPTURED.setdefault(str(plan.model), CapturedPlan(plan, mesh_of(plan), print)).under(plan)
    run.__dict__["_mesh_world"] = PlanOnMesh(captured, settings.pass_name)
    return run


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_s_examples_keep_what_their_plan_promises_on_ranks(name: str, project: Path, pools: Pools) -> None:
    run = run_of(project, pools, name, EXAMPLES[name])
    verdicts = {check: run.check(check) for check in CHECKS}
    assert [(check, one.outcome, one.lines, one.summary) for check, one in verdicts.items() if not one] == []


def test_the_experts_are_launched_before_the_rest_of_their_entry(project: Path, pools: Pools) -> None:
    found = run_of(project, pools, "experts_first", EXAMPLES["experts_first"]).world.passed(0)["joint"].reading
    gathers = [bucket for bucket in found.buckets if bucket.kind == "all_gather" and bucket.fqns[0].startswith("layers.")]
    first = [".experts." in bucket.fqns[0] for bucket in gathers]
    assert first == [True, False] * 4


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [("turned", "parts[::-1]", "no parameter in its order"), ("doubled", "[part * 2 for part in parts]", "aten.mul")],
)
def test_an_operator_is_followed_through_what_it_is_made_of(
    name: str, body: str, said: str, project: Path, pools: Pools
) -> None:
    path = project / "mytrainer" / "joining.py"
    text = path.read_text(encoding="utf-8").replace("for part in parts]", f"for part in {body}]")
    path.write_text(text.replace("mytrainer::join", f"mytrainer::{name}").replace(".join.", f".{name}."), encoding="utf-8")
    verdict = run_of(project, pools, "joining", EXAMPLES["joining"]).check("audit")
    assert verdict.outcome == "failed"
    assert any(said in line for line in verdict.lines), verdict.lines


# Hooks on a small graph: modules a, b and c of two shards each.


def through(**options: Any) -> tuple[fx.GraphModule, PassReport]:
    gm, reports = chain(backward=True), list[PassReport]()
    with fake_world(0, 4):
        manual_overlap_bucketing(gm, ["a", "b", "c"], report=reports.append, **options)
    return gm, reports[0]


def test_a_name_parts_an_entry_and_joins_entries_and_the_report_says_so() -> None:
    class Named(Bucketer):
        def together(self, launch: MergeTarget) -> str:
            return launch.fqns[0] if launch.entry == "a" else "rest"

    _, report = through(bucketer=Named)
    gathers = [(bucket.entry, bucket.members) for bucket in report.buckets if bucket.kind == "all_gather"]
    assert gathers == [
        ("a", ("a_weight",)),
        ("a", ("a_scale",)),
        ("rest", ("b_weight", "b_scale", "c_weight", "c_scale")),
    ]
    assert [split.reason for split in report.buckets[0].splits] == ["together"]


def test_members_lie_as_the_bucketer_says() -> None:
    class Backwards(Bucketer):
        def in_order(self, members: Sequence[MergeTarget]) -> Sequence[MergeTarget]:
            return [*super().in_order(members)][::-1]

    _, report = through(bucketer=Backwards)
    assert next(bucket.members for bucket in report.buckets if bucket.kind == "all_gather") == ("a_scale", "a_weight")


class Last(Scheduler):
    """Launches c's gather where b computes, and waits for c's reduction at the end of a's compute."""

    def launch_before(self, bucket: Merged) -> fx.Node | None:
        return self.named("mul_tensor_2") if bucket.first.entry == "c" else None

    def wait_before(self, bucket: Merged) -> fx.Node | None:
        return self.named("neg_default_5") if bucket.first.entry == "c" else None

    def named(self, name: str) -> fx.Node:
        return next(node for node in self.graph.nodes if node.name == name)


def test_launches_and_waits_stand_where_the_scheduler_says_and_an_edge_keeps_what_it_says() -> None:
    gm, report = through(scheduler=Last)
    launch = next(bucket.launch for bucket in report.buckets if (bucket.entry, bucket.kind) == ("c", "all_gather"))
    reduction = next(bucket.launch for bucket in report.buckets if (bucket.entry, bucket.kind) == ("c", "reduce_scatter"))
    names = [node.name for node in gm.graph.nodes]
    wait = next(user.name for node in gm.graph.nodes if node.name == reduction for user in node.users)
    assert names.index("mul_tensor_1") < names.index(launch) == names.index("mul_tensor_2") - 1
    assert names.index("neg_default_4") < names.index(wait) < names.index("neg_default_5")

    class Kept(Last):
        def kept_in_order(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
            return [pair for pair in pairs if pair[1].name == "mul_tensor_2"]

    _, report = through(scheduler=Kept, insert_overlap_deps=True)
    assert report.kept_order == ((launch, "mul_tensor_2"),)


class ToTwins(Scheduler):
    def group_of(self, bucket: Merged) -> str:
        return self.twin(bucket)


@pytest.mark.parametrize("options", [{"scheduler": Last}, {"scheduler": ToTwins}, {"bucketer": Bucketer}])
def test_a_second_run_changes_nothing(options: dict[str, Any]) -> None:
    gm, _ = through(**options)
    once = encode_module(copied(gm))
    with fake_world(0, 4):
        manual_overlap_bucketing(gm, ["a", "b", "c"], **options)
    assert encode_module(copied(gm)) == once


def hook(base: type[Any], name: str, answer: Any) -> type[Any]:
    return type("Mine", (base,), {name: answer})


def first(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name.startswith(name))


NOT_HAD: dict[str, tuple[type[Any], str, Any, str]] = {
    "no name": (Bucketer, "together", lambda self, launch: None, "Mine.together must give a name (str) for the all_gather of"),
    "a member twice": (Bucketer, "in_order", lambda self, members: [members[0]] * 2, "must give each of the 2 members of the"),
    "no list": (Bucketer, "in_order", lambda self, members: None, "in a list or tuple, and gave None"),
    "no packer": (Bucketer, "packer_of", lambda self, members: 5, "Mine.packer_of must give a packer or its name for the"),
    "no node": (
        Scheduler,
        "launch_before",
        lambda self, bucket: "mul",
        "must give a node of the graph or None for the all_gather",
    ),
    "behind its use": (
        Scheduler,
        "launch_before",
        lambda self, bucket: first(self.graph, "neg"),
        "neg_default is impossible: when neg_default starts, mul_tensor has used what is gathered",
    ),
    "before what it needs": (
        Scheduler,
        "launch_before",
        lambda self, bucket: first(self.graph, "a_weight"),
        "is impossible: when a_weight starts, it needs a_scale",
    ),
    "in a circle": (
        Scheduler,
        "launch_before",
        lambda self, bucket: next((b.launch for b in self.buckets if b is not bucket and b.first.kind == "all_gather"), None),
        "launches are placed before each other in a circle",
    ),
    "a wait before its launch": (
        Scheduler,
        "wait_before",
        lambda self, bucket: first(self.graph, "mul"),
        "is impossible: mul_tensor starts before the reduction is launched",
    ),
    "an unknown group": (Scheduler, "group_of", lambda self, bucket: "7", "on process group '7': this process knows no group"),
    "no group": (Scheduler, "group_of", lambda self, bucket: 7, "Mine.group_of must give the name of a group for the"),
    "no pairs": (Scheduler, "kept_in_order", lambda self, pairs: None, "Mine.kept_in_order must give pairs of nodes in a list"),
    "a pair the wrong way round": (
        Scheduler,
        "kept_in_order",
        lambda self, pairs: [pair[::-1] for pair in pairs],
        "which stands before it",
    ),
    "compute alone": (
        Scheduler,
        "kept_in_order",
        lambda self, pairs: [(first(self.graph, "mul"), first(self.graph, "neg"))],
        "Mine.kept_in_order: of mul_tensor and neg_default neither is a launch or a wait of a bucket",
    ),
}


@pytest.mark.parametrize("case", NOT_HAD)
def test_what_cannot_be_had_is_refused_by_name_and_the_graph_is_as_it_was(case: str) -> None:
    base, name, answer, said = NOT_HAD[case]
    gm = chain(backward=True)
    before, options = encode_module(copied(gm)), {base.__name__.lower(): hook(base, name, answer)}
    with fake_world(0, 4), pytest.raises(PlanError, match=re.escape(said)) as raised:
        manual_overlap_bucketing(gm, ["a", "b", "c"], insert_overlap_deps=True, **options)
    assert "\n" not in str(raised.value)
    assert encode_module(copied(gm)) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bucketer": Scheduler}, "bucketer must be a subclass of pytest_fxbucket.passes.Bucketer, not <class"),
        ({"scheduler": 5}, "scheduler must be a subclass of pytest_fxbucket.passes.Scheduler, not 5"),
        ({"report": []}, "report must be callable(report) or None, not an empty list"),
    ],
)
def test_what_is_no_class_to_decide_by_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        manual_overlap_bucketing(chain(), ["a"], **options)


def test_a_schedule_that_is_found_by_itself_asks_nobody_for_places() -> None:
    own = ManualPass(Bucket(by="size"), Overlap(schedule="auto"), Bucketer, Last)
    graph = chain().graph
    with fake_world(0, 4), pytest.raises(PlanError, match=r"^Last.launch_before has no say with schedule = \"auto\""):
        own.apply(graph, by_size(graph), Estimates(Roofline(CLUSTER, lambda _, count: range(count)), CLUSTER))


def test_the_automatic_drop_in_reports_too() -> None:
    reports: list[PassReport] = []
    with fake_world(0, 4):
        gm = schedule_overlap_bucketing(chain(backward=True), collective_bucketing=True, report=reports.append)
    (report,) = reports
    assert report.launches_after == len(launches(gm.graph))
    assert report.schedule is not None
