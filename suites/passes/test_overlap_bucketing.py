"""The drop-in for torch's automatic scheduler: its call shape, what it does to a graph, and what it says to wrong arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.cost.cluster import cluster_named
from pytest_fxbucket.errors import FxbucketError, PlanError
from pytest_fxbucket.fuzz import lockstep
from pytest_fxbucket.fuzz.program import COLUMNS, Program, aten
from pytest_fxbucket.graph.collectives import is_wait, launch_kind
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.passes import schedule_overlap_bucketing
from pytest_fxbucket.passes.auto.estimates import of_cluster
from pytest_fxbucket.passes.auto.machine import machine_of
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.ranks.pools import Pools
from suites.passes.programs import chain, launches
from suites.passes.rank_jobs_of_schedules import order_by


def milliseconds(node: fx.Node, size: int | None) -> float | None:
    """Products and collectives of a second; all else by the cluster."""
    return 1000.0 if launch_kind(node) or operator_name(node) in ("aten::mul", "aten::neg") else 0.0


def letters(graph: fx.Graph) -> str:
    """``g`` a gather, ``r`` a reduction, ``w`` a wait, ``m`` compute, in order."""
    kinds = {"all_gather": "g", "reduce_scatter": "r"}
    found = []
    for node in graph.nodes:
        kind = launch_kind(node)
        found.append(kinds[kind] if kind else "w" if is_wait(node) else "m" if "mul" in node.name or "neg" in node.name else "")
    return "".join(found)


def test_it_is_called_as_torch_s_is() -> None:
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing as of_torch

    ours, theirs = (inspect.signature(f).parameters for f in (schedule_overlap_bucketing, of_torch))
    known = {name: one for name, one in ours.items() if name in theirs}
    assert list(theirs) == [name for name in ours if name in theirs]
    assert [one.default for one in known.values()] == [one.default for one in theirs.values()]
    assert {name for name in ours if name not in theirs} <= {"cluster", "report"} or torch.__version__ < "2.13"


def test_it_hides_what_can_be_hidden_and_returns_the_graph_module() -> None:
    gm = chain(backward=True)
    before = letters(gm.graph)
    with fake_world(0, 4):
        assert schedule_overlap_bucketing(gm, custom_runtime_estimation=milliseconds, max_memory_increase_ratio=None) is gm
    assert before == "gwm" * 6 + "mrw" * 6
    assert letters(gm.graph).startswith("gg")
    assert letters(gm.graph) != before
    assert sorted(letters(gm.graph)) == sorted(before)


def test_collectives_are_merged_where_that_is_asked_for() -> None:
    gm = chain(backward=True)
    count = len(launches(gm.graph))
    with fake_world(0, 4):
        schedule_overlap_bucketing(gm, collective_bucketing=True, max_memory_increase_ratio=None)
    assert len(launches(gm.graph)) < count


@pytest.mark.parametrize("merging", [False, True])
def test_values_are_as_they_were(merging: bool) -> None:
    gm, after = chain(backward=True), chain(backward=True)
    with fake_world(0, 4):
        schedule_overlap_bucketing(after, collective_bucketing=merging, custom_runtime_estimation=milliseconds)
    assert lockstep.compare(gm, after, 4, {}) == []


def test_a_graph_without_collectives_is_left() -> None:
    made = Program(2)
    gm = made.returns(made.neg(made.given("x", 2, COLUMNS)))
    code = gm.code
    assert schedule_overlap_bucketing(gm) is gm
    assert gm.code == code


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_mode": "coalesced"}, 'bucket_mode must be None, "default", "custom_ops" or "custom_ops_multidtype" here'),
        ({"pge_profile_path": "trace.json"}, 'pge_profile_path must be None here, not "trace.json"'),
        ({"compute_estimator": "benchmrk"}, 'did you mean "benchmark"'),
        ({"max_in_flight_gb": -1}, "max_in_flight_gb must be a number from 0, not -1"),
        ({"max_memory_increase_ratio": float("nan")}, "max_memory_increase_ratio must be a number from 0, not nan"),
        ({"custom_runtime_estimation": 3}, "custom_runtime_estimation must be callable"),
        ({"custom_runtime_estimation": lambda *_: float("nan")}, "custom_runtime_estimation says that .* takes nan seconds"),
        ({"custom_runtime_estimation": lambda *_: "slow"}, "custom_runtime_estimation says that .* takes 'slow' seconds"),
        ({"max_in_flight_gb": 1e-9}, "max_in_flight_gb = 1e-09 is less than all_gather"),
        ({"cluster": "h100"}, 'there is no preset "h100"; did you mean "h100-sxm"'),
        ({"cluster": 3}, "cluster must be a preset's name or a Cluster, not 3"),
    ],
)
def test_what_cannot_be_had_is_one_sentence_and_the_graph_is_as_it_was(options: dict[str, Any], words: str) -> None:
    gm = chain()
    code = gm.code
    with fake_world(0, 4), pytest.raises(FxbucketError, match=words) as caught:
        schedule_overlap_bucketing(gm, **options)
    assert "\n" not in str(caught.value)
    assert gm.code == code
    gm.recompile()
    assert gm.code == code


def test_only_a_graph_module_is_taken() -> None:
    with pytest.raises(PlanError, match=r"gm must be a torch\.fx\.GraphModule, not a value of type Graph"):
        schedule_overlap_bucketing(fx.Graph())  # type: ignore[arg-type]  # that is the point


def test_ranks_that_measure_other_seconds_launch_in_one_order(pools: Pools) -> None:
    with fake_world(0, 4):
        alone = {tuple(order_by(rank)) for rank in range(4)}
    assert len(alone) > 1, "each by its own seconds would not"
    together = pools.get(4).run("suites.passes.rank_jobs_of_schedules:scheduled", [None] * 4, timeout_s=60)
    assert len(set(map(tuple, together))) == 1


def test_what_is_said_to_be_exposed_is_of_the_graph_that_came_out_and_not_of_an_earlier_try() -> None:
    """With little room less is merged in a second try, whose buckets have the names of larger ones."""
    made = Program(4)
    x = made.given("x", 1024, 1024)
    for number in range(8):
        gathered = made.gather(made.given(f"w{number}", 2048, 1024))
        y = made.call(aten.mm.default, x, made.call(aten.t.default, gathered))
        x = made.call(aten.add.Tensor, x, made.call(aten.mm.default, y, gathered))
    gm, said = made.returns(x), list[PassReport]()
    with fake_world(0, 4):
        schedule_overlap_bucketing(
            gm, collective_bucketing=True, max_memory_increase_ratio=0.5, max_memory_increase_gb=None, report=said.append
        )
        nodes = list(gm.graph.nodes)
        right = machine_of(nodes, of_cluster(cluster_named("h100-sxm", Path.cwd()))).run(range(len(nodes)))
    assert said[0].schedule is not None
    assert said[0].schedule.exposed == pytest.approx(right.exposed, rel=1e-9)


def test_ranks_whose_groups_have_other_names_agree(pools: Pools) -> None:
    job = "suites.passes.rank_jobs_of_schedules:over_groups_of_other_names"
    launches = pools.get(4).run(job, [None] * 4, timeout_s=60)
    assert len(set(launches)) == 1 <= launches[0]


def test_ranks_with_other_graphs_are_told_by_name(pools: Pools) -> None:
    found = pools.get(2).run("suites.passes.rank_jobs_of_schedules:of_other_graphs", [None] * 2, timeout_s=60)
    assert found[0].startswith("ranks cannot agree on seconds, since they have other graphs: rank 1 has ")
    assert "neg_default" in found[0]
