"""Variations of a schedule that change no value: none of them raises an alarm."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.compat.fx import uncompiled, why_not_its_graph
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.checks.small_llama import SmallLlama

HERE = Path(__file__).parent
RANKS = 2
ALL_IN_ONE = parse_entries(["tok_embeddings+layers.[0-1]+norm+output"], "test")


def made_in(folder: Path, pools: Pools, **parallel: object) -> SmallLlama:
    made = SmallLlama.make(folder, pools, RANKS, **parallel)
    shutil.copy(HERE / "legal_passes.py", made.plan.path.parent)
    return made


@pytest.fixture(scope="module")
def llama(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> SmallLlama:
    return made_in(tmp_path_factory.mktemp("llama"), pools)


@pytest.fixture(scope="module")
def copied_llama(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> SmallLlama:
    """On a mesh of two dimensions."""
    return made_in(tmp_path_factory.mktemp("llama"), pools, dp_replicate=2, mode="hybrid_shard")


def run_of(llama: SmallLlama, pass_name: str = "manual", bucket: Any = None, overlap: Any = None) -> PlanRun:
    plan = replace(
        llama.plan,
        bucket=replace(llama.plan.bucket, **(bucket or {})),
        overlap=replace(llama.plan.overlap, **(overlap or {})),
    )
    folder = plan.path.parent
    run = PlanRun(plan, RunSettings(folder, folder / "golden", folder / "artifacts", pass_name), llama.pools)
    run.__dict__["_mesh_world"] = llama.captured.under(plan).by_pass(pass_name)
    return run


VARIATIONS: dict[str, dict[str, Any]] = {
    "as planned": {},
    "nothing merged": {"bucket": {"enabled": False}},
    "execution order": {"bucket": {"layout": "execution"}},
    "several dtypes": {"bucket": {"dtypes": "mixed"}},
    "by size": {"bucket": {"by": "size", "plan": (), "cap_mb": (0.05,)}},
    "one bucket": {"bucket": {"plan": ALL_IN_ONE}, "overlap": {"prefetch": 0}},
    "columns reshaped": {"bucket": {"packer": "suites.benchmarks.pack_forms:reshaped"}},
    "gradients owned": {"bucket": {"packer": "suites.benchmarks.pack_forms:owned"}},
    "gradients sliced": {"bucket": {"packer": "suites.benchmarks.pack_forms:sliced"}},
    "joined by cat": {"bucket": {"packer": "suites.benchmarks.pack_forms:fused"}},
    "order kept": {"overlap": {"insert_overlap_deps": True}},
    "gathers on a group of their own": {"overlap": {"gather_group": "own"}},
    "torch's pass": {"pass_name": "torch"},
    **{
        name: {"pass_name": f"legal_passes:{name}"}
        for name in ("untouched", "shuffled_1", "shuffled_again", "written_out", "gathered_anew")
    },
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_legal_variation_raises_no_alarm(llama: SmallLlama, name: str) -> None:
    verdict = run_of(llama, **VARIATIONS[name]).check("same")
    assert verdict, repr(verdict)
    assert verdict.summary == f"22 outputs stand for the same expressions on {RANKS} ranks"


def test_ranks_that_launch_what_does_not_belong_together_are_red_though_each_by_itself_is_right(llama: SmallLlama) -> None:
    verdict = run_of(llama, "legal_passes:crosswise").check("same")
    assert verdict.outcome == "failed"
    assert "does not belong together: rank 0 sends" in verdict.lines[0]


@pytest.mark.parametrize(("name", "words"), [("gathers_traded_on_rank_3", "2,3"), ("sums_traded_on_rank_2", "0,2")])
def test_ranks_are_paired_along_each_dimension_of_a_mesh(copied_llama: SmallLlama, name: str, words: str) -> None:
    verdict = run_of(copied_llama, f"legal_passes:{name}").check("same")
    assert verdict.outcome == "failed"
    (line,) = verdict.lines
    assert line.partition(" on ranks ")[2].startswith(f"{words} does not belong together: rank {words[0]} sends"), line


def test_a_legal_pass_raises_no_alarm_on_a_mesh_of_two_dimensions(copied_llama: SmallLlama) -> None:
    verdict = run_of(copied_llama, "torch").check("same")
    assert verdict, repr(verdict)


def test_a_forward_that_is_not_the_graphs_is_named(llama: SmallLlama) -> None:
    verdict = run_of(llama, "legal_passes:forward_of_my_own").check("same")
    assert verdict
    said = "the joint graph that the pass returned has a forward that is not its graph's: the graph is what is compared and run"
    assert said in verdict.summary


def test_a_lazy_module_has_its_graphs_forward_before_its_first_call_and_after() -> None:
    module = uncompiled({}, fx.symbolic_trace(torch.nn.ReLU()).graph)
    assert why_not_its_graph(module) == ""
    module(torch.ones(1))
    assert why_not_its_graph(module) == ""
