"""Wrong splits of a small Llama, each red with its stage and its value named; and the right one, green."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.pipeline.captured import StagedStep
from pytest_fxbucket.pipeline.schedules import table_of
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.pipeline import wrong_running, wrong_splits
from suites.pipeline.changed_tables import Change, changed, moved, swapped, without

CHECKS = ("audit", "same", "collectives", "bitwise")


@dataclass
class Captured:
    """The plan, captured once."""

    plan: Plan
    pools: Pools
    right: PlanOnMesh

    def check(self, name: str, wrong: Callable[[StagedStep], StagedStep] | None = None, steps: int = 1) -> Verdict:
        folder = self.plan.path.parent
        plan = replace(self.plan, run=replace(self.plan.run, steps=steps))
        run = PlanRun(plan, RunSettings(folder, folder / "golden", folder / "artifacts"), self.pools)
        run.__dict__["_mesh_world"] = self.right if wrong is None else self._wrong(wrong)
        return run.check(name)

    def _wrong(self, wrong: Callable[[StagedStep], StagedStep]) -> PlanOnMesh:
        assert self.right.staged is not None
        world = self.right.under(self.plan)
        world.captured.__dict__["staged"] = wrong(self.right.staged)
        return world


PLAN = """
[model]
factory = "suites.pipeline.wrong_split_models:build"
batch = "suites.pipeline.wrong_split_models:batch"
loss = "fixtures.models.llama:loss"

[parallel]
pp = 3

[pipeline]
cuts = ["layers.0.feed_forward.w1", "layers.1.attention"]
schedule = "1F1B"

[step]
microbatches = 4
clip_norm = 0.01

[optimizer]
factory = "torch.optim:AdamW"
args = { lr = 0.01 }

[bucket]
plan = ["tok_embeddings+norm+output", "layers.0+layers.1"]

[checks]
eager = false

[run]
timeout_s = 60
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> Captured:
    path = tmp_path_factory.mktemp("wrong_splits") / "llama.toml"
    path.write_text(PLAN)
    plan = load_plans(path)[0]
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), print), "manual")
    assert world.staged is not None
    return Captured(plan, pools, world)


def assert_red(verdict: Verdict, check: str, words: tuple[str, ...]) -> None:
    """With all of ``words`` in one line."""
    print(repr(verdict), *verdict.lines, sep="\n")
    assert (verdict.check, verdict.outcome) == (check, "failed")
    assert any(all(word in line for word in words) for line in (verdict.summary, *verdict.lines))


@pytest.mark.parametrize("check", CHECKS)
def test_the_right_split_is_green(captured: Captured, check: str) -> None:
    verdict = captured.check(check, steps=2)
    assert verdict, repr(verdict)


BY_GRAPHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "another_module_cut_behind": (
        "audit",
        ("stage 1 runs layers.0.feed_forward.w3 (", "), which is in stage 0 by the plan's cuts"),
    ),
    "bypass_dropped": ("audit", ("stage 1 is to send [0] forward, but neither makes nor receives it",)),
    "value_dropped": ("audit", ("stage 1 reads add_3 in forward, which it has not received",)),
    "gradient_of_activation_dropped": ("audit", ("stage 1 reads add_16 in backward, which it has not received",)),
    "received_by_a_stage_that_does_not_read_it": (
        "audit",
        ("stage 0 receives add_16, which it neither reads nor sends on",),
    ),
    "swapped_by_the_sender": ("same", ("add_3 of stage 0 as stage 1 receives it",)),
    "swapped_by_the_receiver": ("same", ("crossing add_5 of stage 1 as stage 2 receives it", "first differs at add_3")),
    "another_order_on_one_rank": (
        "audit",
        (
            "ranks 0 and 1 of pp do not agree",
            "between stages 0 and 1: tensor 1 is [0] on the one, _unsafe_view_10 on the other",
        ),
    ),
    "another_shape_on_one_rank": (
        "audit",
        ("ranks 0 and 2 of pp do not agree on add_5, which crosses forward between stages",),
    ),
    "another_stride_said": (
        "audit",
        ("stage 0 is to send add_3 forward as [2, 8, 16] with strides [16, 32, 1]", "but it is", "[128, 16, 1]"),
    ),
    "another_dtype_said": ("audit", ("stage 0 is to send add_3 forward as", "torch.int32, but it is")),
    "gradient_lost": ("audit", ("no stage gives the gradient of layers.0.feed_forward.w3.weight of stage 1",)),
    "gradient_given_twice": ("audit", ("stage 1 gives the gradient of layers.0.feed_forward.w3.weight twice",)),
    "gradients_of_weights_in_both_parts": (
        "audit",
        ("stage 1 gives the gradient of layers.0.feed_forward.w3.weight twice",),
    ),
    "gradients_of_weights_with_those_of_inputs": (
        "audit",
        ("stage 1 gives the gradient of layers.0.feed_forward.w3.weight in input, where the stage before waits and",),
    ),
    "gradient_not_reduced": (
        "audit",
        ("stage 1 reduces the gradient of layers.0.feed_forward.w3.weight never, expected once",),
    ),
    "parameter_not_gathered": (
        "audit",
        ("stage 1 reads layers.0.feed_forward.w3.weight in forward, which it does not gather",),
    ),
    "another_parameter_updated": ("audit", ("rank 1 of pp updates norm.weight, which its stages, 1, do not read",)),
    "clipped_over_the_own_stage": ("bitwise", ("step 0, rank 0: ", "tok_embeddings.weight of stages 0, 2")),
    "tie_not_summed": (
        "audit",
        ("rank 1 of pp has the tied parameter layers.0.attention_norm.weight in stages 1, but sums 0 of its gradients into 0",),
    ),
    "tie_without_one_stage": (
        "audit",
        ("stages 0, 1, 2 each give a gradient of layers.0.attention_norm.weight, and no tie has them together",),
    ),
    "tie_summed_twice": ("bitwise", ("gradient layers.0.attention_norm.weight of stages 0, 1, 2",)),
    "activation_computed_otherwise_in_backward": ("same", ("stage 1 backward", "layers.0.feed_forward")),
    "hook_before_forward_lost": ("same", ("add_3 of stage 0", "gives [0] (batch); before the pass it was flip")),
    "hook_behind_forward_lost": ("same", ("add_16 of stage 2", "in output, stage 2 forward", "it was mul")),
    "buffer_written_twice": ("same", ("layers.1.attention_norm.seen", "stage 1 forward")),
}
"""Check, and what one line has; by the function of :mod:`wrong_splits`."""


@pytest.mark.parametrize("name", BY_GRAPHS)
def test_wrong_stages(captured: Captured, name: str) -> None:
    check, words = BY_GRAPHS[name]
    assert_red(captured.check(check, getattr(wrong_splits, name)), check, words)


BY_RUNNING: dict[str, tuple[str, ...]] = {
    "microbatch_run_twice": ("stage 1 is to run forward of microbatch 1 twice",),
    "gradients_added_last_first": ("step 0, rank 1: gradient layers.0.feed_forward.w3.weight of stage 1",),
    "reduced_behind_the_first_microbatch": ("stage 2 is to reduce gradients before those of microbatch 1 are there",),
    "labels_of_another_microbatch": ("step 0, rank 2: loss of stage 2",),
    "sent_in_another_layout": ("add_3, which stage 0 makes, was traced as [2, 8, 16] with strides [128, 16, 1]", "it is"),
    "gathered_for_each_microbatch": ("stage 0 unshard ran 4 times in one step, expected once",),
    "another_schedule": ("1F1B ran 0F3 as action ", " of this rank, where the table that was checked has 0RECV_B0"),
    "swapped_when_sent": ("stage 1 received another add_3 of microbatch 0 than stage 0 made, on rank 1",),
}


@pytest.mark.parametrize("name", BY_RUNNING)
def test_wrong_running(captured: Captured, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert callable(getattr(wrong_running, name))
    monkeypatch.setattr("pytest_fxbucket.checks.bitwise.check._JOB", f"{wrong_running.__name__}:{name}")
    assert_red(captured.check("bitwise"), "bitwise", BY_RUNNING[name])


BY_TABLE: dict[str, tuple[tuple[str, int, int, int], int, Change, tuple[str, ...]]] = {
    "a send without receive": (
        ("1F1B", 3, 3, 4),
        1,
        without("1RECV_F2"),
        ("rank 0 has SEND_F of stage 0, microbatch 2 once, but rank 1 has RECV_F of stage 1, microbatch 2 never",),
    ),
    "a microbatch run twice": (
        ("1F1B", 3, 3, 4),
        1,
        lambda own: [one for one in own for _ in range(1 + (one.token == "1F1"))],
        ("stage 1, microbatch 1 runs forward 2 times",),
    ),
    "another order on one rank": (
        ("1F1B", 3, 3, 4),
        2,
        swapped("2F1", "2B1"),
        ("rank 2 has B of stage 2, microbatch 1 before",),
    ),
    "reduced too early": (
        ("1F1B", 3, 3, 4),
        0,
        moved("0REDUCE_GRAD", behind="0B0"),
        ("B of stage 0, microbatch 1 behind REDUCE_GRAD of stage 0",),
    ),
    "a deadlock at eight stages": (
        ("GPipe", 8, 8, 8),
        3,
        moved("3SEND_F7", behind="3RECV_B0"),
        ("ranks wait for ever: rank 3 at RECV_B of stage 3, microbatch 0 for rank 4",),
    ),
}


@pytest.mark.parametrize("name", BY_TABLE)
def test_wrong_tables(captured: Captured, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    numbers, rank, change, words = BY_TABLE[name]
    wrong = changed(table_of(*numbers), rank, change)
    monkeypatch.setattr("pytest_fxbucket.checks.context.table_of", lambda *_: wrong)
    assert_red(captured.check("collectives"), "collectives", words)
    assert captured.check("bitwise").outcome == "skipped"  # its ranks would hang


def test_every_wrong_split_is_run() -> None:
    made = {name for name, one in vars(wrong_splits).items() if _takes_stages_alone(one)}
    assert made == set(BY_GRAPHS)
    assert len(BY_GRAPHS) + len(BY_RUNNING) + len(BY_TABLE) >= 25


def _takes_stages_alone(one: object) -> bool:
    return inspect.isfunction(one) and one.__annotations__ == {"staged": "StagedStep", "return": "StagedStep"}
