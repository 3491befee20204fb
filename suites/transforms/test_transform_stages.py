"""What a plan runs on a step, in which order, and what each transformation must leave as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.context import disagreements
from pytest_fxbucket.errors import FxbucketError, PassError, PlanError
from pytest_fxbucket.plan.factories import first_on_path
from pytest_fxbucket.plan.load import load_plans, parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.roles import StepGraph
from pytest_fxbucket.transforms import transformation
from suites.plans.llama import llama

PLAN = llama("layers = 1, dim = 16, heads = 2, kv_heads = 1")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def own_path() -> Iterator[None]:
    with first_on_path([HERE]):
        yield


@pytest.fixture(scope="module")
def captured() -> PlanOnMesh:
    """Traced once for all."""
    world = PlanOnMesh(CapturedPlan(*_of("")), "manual")
    world.step(0)
    return world


def _of(tables: str) -> tuple[object, object]:  # type: ignore[return]  # a plan and its mesh
    (plan,) = parse_plans(PLAN + tables, Path("plan.toml"))
    return plan, mesh_of(plan)


def world_of(captured: PlanOnMesh, *names: str, args: str = "") -> PlanOnMesh:
    tables = "".join(f'\n[[transform]]\nname = "{name}"\n{args}\n' for name in names)
    return captured.under(_of(tables)[0])


def refused(captured: PlanOnMesh, *names: str, args: str = "") -> str:
    with pytest.raises(FxbucketError) as caught:
        world_of(captured, *names, args=args).versions(0)
    return str(caught.value)


def order(world: PlanOnMesh) -> tuple[list[str], list[str]]:
    return [one.name for one in world.captured.stages.before], [one.name for one in world.captured.stages.after]


def test_without_transformations_the_final_step_is_what_the_pass_made(captured: PlanOnMesh) -> None:
    versions = captured.versions(0)
    assert (versions.reference, versions.step, versions.final) == (captured.step(0), captured.step(0), versions.passed)


def test_one_that_changes_nothing_gives_the_same_graph_before_and_after_the_pass(captured: PlanOnMesh) -> None:
    digest = captured.final(0)["joint"].digest
    for names in (("own_transforms:same", "bucket"), ("bucket", "own_transforms:same")):
        assert world_of(captured, *names).final(0)["joint"].digest == digest


def test_the_pass_stands_last_or_before_the_first_that_must_come_after_it(captured: PlanOnMesh) -> None:
    same, late = "own_transforms:same", "own_transforms:late"
    assert order(world_of(captured, same)) == ([same], [])
    assert order(world_of(captured, same, late, same)) == ([same], [late, same])
    assert order(world_of(captured, same, "bucket", same)) == ([same], [same])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("add_before_reducing", "rounds otherwise than the step before it"),
        ("next_iteration", "gives set-up, steady and clean-up graphs"),
    ],
)
def test_what_stages_cannot_be_compared_behind_is_refused_beside_them(name: str, why: str) -> None:
    plan, mesh = _of(f'[pipeline]\ncuts = ["layers.0"]\nschedule = "LoopedBFS"\n[[transform]]\nname = "{name}"\n')
    with pytest.raises(PlanError) as caught:
        CapturedPlan(plan, mesh).stages  # noqa: B018  # looked up, which imports them
    assert str(caught.value) == (
        f"plan.toml: [[transform]] 1: {name} {why}, and [pipeline] has the graphs of stages, bit for bit the step that is in "
        "none; leave one of them out, by a matrix row"
    )


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["bucket", "own_transforms:early"], "2: own_transforms:early must come before bucket; list it above that"),
        (["own_transforms:late", "bucket"], "1: own_transforms:late must come after bucket; list it below that"),
        (
            ["own_transforms:same", "own_transforms:rounding"],
            "1: own_transforms:same must come after own_transforms:rounding, which rounds otherwise: what comes before that is "
            "compared with nothing; list it below that",
        ),
        (["own_transforms:crossing", "own_transforms:same"], "1: own_transforms:crossing gives three graphs, and "),
        (["own_transforms:saying"], "1: own_transforms:saying: there is nothing to say"),
        (
            ["bucket", "own_transforms:late", "own_transforms:early"],
            "2: own_transforms:late must come after own_transforms:early; list it below that",
        ),
        (
            ["bucket", "own_transforms:rounding"],
            "2: own_transforms:rounding rounds otherwise than the step before it, so it must come before bucket: what comes "
            "after is compared bit for bit; list it above that",
        ),
        (
            ["own_transforms:updating"],
            "1: own_transforms:updating needs the update of an optimizer, and the step has none; add",
        ),
        (["own_transforms:sane"], '1: module "own_transforms" has no "sane"; did you mean "same"?'),
        (["own_transforms:raising"], "1: own_transforms:raising failed at "),
        (["own_transforms:nothing"], "1: own_transforms:nothing gave a value of type NoneType; it is to give the StepGraph"),
        (["own_transforms:telling"], "1: own_transforms:telling: missing a required argument: 'word'"),
        (["bucket", "bucket"], "1 and 2 are both the pass, bucket; list it once"),
    ],
)
def test_what_cannot_be_is_a_sentence_that_names_it(captured: PlanOnMesh, names: list[str], sentence: str) -> None:
    assert refused(captured, *names).startswith(f"plan.toml: [[transform]] {sentence}")


def test_the_pass_takes_no_args(captured: PlanOnMesh) -> None:
    assert "[[transform]] 1: bucket takes no args; [bucket] and [overlap] say" in refused(
        captured, "bucket", args="args = { a = 1 }"
    )


def test_an_unknown_argument_is_named(captured: PlanOnMesh) -> None:
    said = refused(captured, "own_transforms:same", args="args = { often = 2 }")
    assert "own_transforms:same: got an unexpected keyword argument 'often'" in said


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("not_waiting", "broke the step: "),
        ("forgetting", "broke the step: reduce_scatter"),
        ("forgetting_with_leave", "is launched no more"),
        ("swapping", "reads or makes"),
    ],
)
def test_the_first_that_breaks_an_invariant_is_named(captured: PlanOnMesh, name: str, problem: str) -> None:
    said = refused(captured, "own_transforms:same", f"own_transforms:{name}", "own_transforms:same")
    assert said.startswith(f"plan.toml: [[transform]] 2: own_transforms:{name} broke the step: ")
    assert problem in said


_ANOTHER = "makes another graph of the same one "


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("by_environment", f"{_ANOTHER}where no variable of the environment is CI or begins with PYTEST_, FXBUCKET_, "),
        ("counting_by_environment", f"{_ANOTHER}where no variable of the environment is CI"),
        ("each_time", f"{_ANOTHER}when it is called again: it goes by chance, by time, or by what it kept"),
        ("only_in_ci", r"failed at .*KeyError: 'FXBUCKET_OWN', where no variable of the environment is CI"),
    ],
)
@pytest.mark.parametrize("others", [[], ["bucket"]], ids=["before the pass", "behind it"])
def test_one_that_goes_by_more_than_the_step_is_refused(
    captured: PlanOnMesh, monkeypatch: pytest.MonkeyPatch, name: str, words: str, others: list[str]
) -> None:
    monkeypatch.setenv("FXBUCKET_OWN", "3")
    said = refused(captured, *others, f"own_transforms:{name}")
    assert re.match(rf"plan\.toml: \[\[transform\]\] {len(others) + 1}: own_transforms:{name} {words}", said), said


def test_first_values_may_be_changed_in_place_and_are_held_too(captured: PlanOnMesh) -> None:
    names = [f"own_transforms:{name}" for name in ("counting", "one_more", "one_more")]
    assert float(world_of(captured, *names).final_step(0).first_state["calls"]) == 2.0
    said = refused(captured, names[0], "own_transforms:filled_by_environment")
    assert said.startswith(f"plan.toml: [[transform]] 2: own_transforms:filled_by_environment {_ANOTHER}where no variable")


def test_what_no_rank_can_be_sent_may_be_taken_out_by_a_later_one(captured: PlanOnMesh) -> None:
    world_of(captured, "own_transforms:marking", "own_transforms:unmarking").final(0)
    assert "a function inside a function, which no rank can import" in refused(captured, "own_transforms:marking")


def test_first_values_of_state_may_be_drawn(captured: PlanOnMesh) -> None:
    firsts = [world_of(captured, "own_transforms:drawing").final_step(0).first_state["calls"] for _ in range(2)]
    assert firsts[0] == firsts[1] != 0


def test_one_that_rounds_by_rank_is_refused_since_nothing_would_compare_the_ranks(captured: PlanOnMesh) -> None:
    world = world_of(captured, "own_transforms:rounding_by_rank")
    world.versions(0)
    with pytest.raises(
        PassError, match=r"^plan\.toml: own_transforms:rounding_by_rank \(by rank\) makes .* as rank 1 than as rank 0$"
    ):
        world.versions(1)


def test_ranks_that_disagree_behind_one_name_it(captured: PlanOnMesh) -> None:
    lines = disagreements(world_of(captured, "own_transforms:same", "own_transforms:by_rank", "bucket"))
    assert lines, "the ranks launch in another order"
    assert all(line.startswith("behind own_transforms:by_rank: collective ") for line in lines)
    assert disagreements(world_of(captured, "own_transforms:same")) == []


def test_what_it_says_is_kept(captured: PlanOnMesh) -> None:
    (told,) = world_of(captured, "own_transforms:telling", args='args = { word = "so" }').final_step(0).transformed
    assert (told.done, told.left) == (("said so",), (("a launch", "it was not asked for"),))


def test_state_that_it_adds_is_in_the_final_step_with_its_first_tensor(captured: PlanOnMesh) -> None:
    step = world_of(captured, "own_transforms:counting").final_step(0)
    assert step.inputs["joint"][0].fqn == "calls"
    assert float(step.first_state["calls"]) == 0.0
    assert not captured.step(0).first_state


@pytest.mark.parametrize(
    ("traits", "sentence"),
    [
        ({"after": "bucket"}, r"@transformation: after is 'bucket', expected a list of names, \['bucket'\]"),
        ({"needs": ["optimiser"]}, "@transformation: needs names 'optimiser', expected roles or optimizer"),
    ],
)
def test_a_mark_that_would_say_nothing_is_refused(traits: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=f"^{sentence}$"):
        transformation(**traits)


def test_ranks_with_other_graphs_are_named(captured: PlanOnMesh) -> None:
    world = world_of(captured, "own_transforms:same")
    versions = {rank: world.versions(rank) for rank in world.ranks()}
    (staged,) = versions[1].before
    world._versions[1] = replace(versions[1], before=(replace(staged, looked={"steady": staged.looked["joint"]}),))
    assert disagreements(world) == ["behind own_transforms:same: rank 0 has graphs joint, rank 1 steady"]


UPDATED = """
[optimizer]
factory = "torch.optim:SGD"
args = { lr = 0.1 }
groups = "entry"
[run]
backend = "local"
steps = 1
"""


def test_the_learning_rate_of_another_group_is_seen(tmp_path: Path, pools: Pools) -> None:
    """All rates are the same in the plan, and there is but one step."""
    path, steps, outcomes = tmp_path / "plan.toml", dict[int, StepGraph](), list[str]()
    for order in (("same", "bucket"), ("one_rate", "bucket"), ("bucket", "one_rate")):
        named = (name if name == "bucket" else f"suites.transforms.own_transforms:{name}" for name in order)
        tables = (f'[[transform]]\nname = "{name}"\n' for name in named)
        path.write_text(PLAN + UPDATED + "".join(tables))
        plan = load_plans(path)[0]
        run = PlanRun(plan, RunSettings(tmp_path, tmp_path / "golden", tmp_path / "artifacts"), pools)
        # The step before all transformations is the same, and traced once.
        run.__dict__["_mesh_world"] = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), _steps=steps), "manual")
        outcomes.append(run.check("bitwise").outcome)
    assert outcomes == ["passed", "failed", "failed"]
