"""Passes whose values are right for every batch that comes, and for no other: bitwise cannot see them, same does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import fx

from pytest_fxbucket.graph.groups import members_of_groups
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.same.two_graphs import problems
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.mesh import fake_mesh
from pytest_fxbucket.step.portable import own_copy
from suites.checks.small_llama import SmallLlama
from suites.same.hidden_passes import HIDDEN

HERE = Path(__file__).parent
GIVEN = """
[graph]
factory = "given_step:step"

[parallel]
dp_shard = 2

[bucket]
plan = ["only"]

[run]
steps = 1
backend = "local"
"""


@pytest.fixture(scope="module")
def llama(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallLlama]:
    made = SmallLlama.make(tmp_path_factory.mktemp("llama"), pools, ranks=2)
    shutil.copy(HERE / "hidden_passes.py", made.plan.path.parent)
    return replace(made, plan=replace(made.plan, run=replace(made.plan.run, backend="local")))


@pytest.fixture
def given(pools: Pools, tmp_path: Path) -> Iterator[tuple[Path, Pools]]:
    (tmp_path / "given.toml").write_text(GIVEN)
    for name in ("hidden_passes.py", "given_step.py"):
        shutil.copy(HERE / name, tmp_path)
    return tmp_path, pools


def run_of(given: tuple[Path, Pools], pass_name: str) -> PlanRun:
    folder, pools = given
    settings = RunSettings(folder, folder / "golden", folder / "artifacts", pass_name)
    return PlanRun(load_plans(folder / "given.toml")[0], settings, pools)


@pytest.mark.parametrize("hidden", HIDDEN, ids=lambda hidden: hidden.__name__)
def test_it_is_red_with_its_place_and_both_expressions(llama: SmallLlama, hidden: Callable[..., fx.GraphModule]) -> None:
    before = llama.captured.step(0).graphs["joint"]
    after = own_copy(before)
    with fake_mesh(llama.captured.mesh, 0):
        hidden(after, [])
        first = problems(before, after, members_of_groups(before.graph))[0]
    assert "first differs at" in first
    assert "; before the pass it was " in first


def test_all_of_them_together_are_green_in_bitwise(llama: SmallLlama) -> None:
    run = llama.run("hidden_passes:all_of_them")
    assert run.check("bitwise"), repr(run.check("bitwise"))
    verdict = run.check("same")
    assert verdict.outcome == "failed"
    assert "; before the pass it was " in verdict.lines[0]


def test_what_is_wrong_at_the_real_mesh_alone_is_found_there(llama: SmallLlama) -> None:
    folder = llama.plan.path.parent
    plan = replace(
        llama.plan,
        parallel=replace(llama.plan.parallel, dp_shard=4),
        run=Run(world={"dp_shard": 2}, steps=1, backend="local"),
    )
    settings = RunSettings(folder, folder / "golden", folder / "artifacts", "hidden_passes:at_the_real_mesh")
    run = PlanRun(plan, settings, llama.pools)
    assert run.check("bitwise")
    verdict = run.check("same")
    assert verdict.outcome == "failed"
    assert "mul.Tensor(" in verdict.lines[0]


def test_a_product_for_nobody_is_waste(llama: SmallLlama) -> None:
    (line,) = llama.run("hidden_passes:product_for_nobody").check("same").lines
    assert line.startswith("waste: ")
    assert "computes what nobody reads and what was not computed before the pass" in line


def test_a_second_computation_is_waste(llama: SmallLlama) -> None:
    (line,) = llama.run("hidden_passes:computed_twice").check("same").lines
    assert line.startswith("waste: ")
    assert line.endswith("as before the pass; the values are the same")


@pytest.mark.parametrize("name", ["constants_changed_in_place", "given_graph_changed"])
def test_a_pass_that_breaks_what_it_was_given_does_not_break_what_it_is_compared_with(
    given: tuple[Path, Pools], name: str
) -> None:
    run = run_of(given, f"hidden_passes:{name}")
    assert run.check("same").outcome == "failed"
    assert run.check("bitwise").outcome == "failed"
    assert run_of(given, "manual").check("same")
