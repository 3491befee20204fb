"""Resharding by entry and checkpoints: what backward gathers and computes again, in the captured graph and before the audit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.promises.expectations import promise_of
from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_model import Step
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.roles import StepGraph
from suites.capture.steps import is_backward, launches, plan_of, sent_by

ENTRIES = ("layers.*", "head")


def plan(asked: Any, *entries: str, factory: str = "residual", unplanned: str = "error") -> Plan:
    one = plan_of(factory, reshard_after_forward=asked)
    return replace(one, bucket=Bucket(plan=parse_entries(list(entries), "plan"), unplanned=unplanned))


WORLDS: dict[str, PlanOnMesh] = {}


def world_of(one: Plan) -> PlanOnMesh:
    """The plan on its mesh, captured once for all tests."""
    return WORLDS.setdefault(repr(one), PlanOnMesh(CapturedPlan(one, mesh_of(one)), "manual"))


def gathered_again(one: Plan) -> list[str]:
    """FQNs of what backward gathers."""
    step = world_of(one).step(0)
    sent = sent_by(step)
    return sorted(sent[node] for node in launches(step, "all_gather", "backward"))


LAYERS = [f"layers.{layer}.weight" for layer in (1, 2)]
"""The first layer's is not read in backward, since inputs need no gradient."""


@pytest.mark.parametrize(
    ("asked", "again"),
    [
        (None, LAYERS),
        (True, ["head.weight", *LAYERS]),
        (False, []),
        ({"layers.1": False, "head": True}, ["head.weight", "layers.2.weight"]),
        ({"layers.*": False}, []),
    ],
)
def test_backward_gathers_again_what_its_entry_says(asked: Any, again: list[str]) -> None:
    assert gathered_again(plan(asked, *ENTRIES)) == again


def test_left_out_without_entries_all_is_gathered_again() -> None:
    assert gathered_again(plan(None)) == gathered_again(plan(True)) == ["head.weight", *LAYERS]


def test_the_last_entry_is_the_one_whose_parameter_is_read_last_even_if_it_was_gathered_first() -> None:
    """A head tied to the embedding: gathered where the embedding is read, read once more at the end."""
    assert gathered_again(plan(None, "first", factory="Tied")) == []


def test_fsdp2s_root_stays_though_another_entry_is_last() -> None:
    assert gathered_again(plan(None, "layers.[1-2]", "head", unplanned="root")) == ["layers.1.weight", "layers.2.weight"]


def test_a_module_that_is_called_root_is_not_fsdp2s_root() -> None:
    named = plan(None, "first", "root", "head", factory="Rooted")
    assert gathered_again(named) == ["root.weight"]
    kept = problems(plan({"root": False}, "first", "root", "head", factory="Rooted"), None)
    assert kept == ["reshard_after_forward is true there, but backward reads forward's gather of root.weight"]


def test_a_table_that_names_no_entry_is_told_with_the_plans_name() -> None:
    with pytest.raises(PlanError, match=r'plan.toml: \[parallel\] reshard_after_forward names "tail", which is no entry'):
        capture_plan(plan({"tail": True}, *ENTRIES), shard_mesh(4), 0)


def test_what_stays_gathered_hides_the_first_gather_of_backward() -> None:
    """Launched where the head's backward begins, as FSDP2's root prefetches the last layer; without a prefetch where it was."""
    one = plan(None, *ENTRIES)
    passed = world_of(one).passed(0)["joint"].reading
    first = next(b for b in passed.buckets if b.kind == "all_gather" and b.direction == "backward")
    assert first.fqns[0].startswith("layers.2")
    head = [where for where, direction, fqn in passed.computes if direction == "backward" and fqn.startswith("head")]
    assert first.launch < min(head) <= max(head) < (first.wait or 0)
    late = replace(one, overlap=replace(one.overlap, prefetch=0))
    passed = world_of(late).passed(0)["joint"].reading
    first = next(b for b in passed.buckets if b.kind == "all_gather" and b.direction == "backward")
    head = [where for where, direction, fqn in passed.computes if direction == "backward" and fqn.startswith("head")]
    assert max(head) < first.launch


def problems(traced: Plan, promised: Any) -> list[str]:
    """What an audit for ``promised`` finds in the step of ``traced``."""
    world = world_of(traced)
    other = replace(traced, parallel=replace(traced.parallel, reshard_after_forward=promised))
    promise = promise_of(other, world.step(0).parameters, world.resolution, world.members)
    found = audit(promise, world.reading(0)["joint"], world.passed(0)["joint"].reading)
    return [problem for problem in found if "reshard" in problem]


@pytest.mark.parametrize(
    ("traced", "promised", "says"),
    [
        (None, None, []),
        ({"layers.1": False}, {"layers.1": False}, []),
        (True, None, ["reshard_after_forward is false there, but backward gathers head.weight again"]),
        (None, True, ["reshard_after_forward = true, but backward reads forward's gather of head.weight"]),
        (
            {"layers.1": False},
            {"head": False},
            ["reshard_after_forward is true there, but backward reads forward's gather of layers.1.weight"],
        ),
    ],
)
def test_the_audit_holds_each_entry_to_what_the_plan_says_of_it(traced: Any, promised: Any, says: list[str]) -> None:
    assert problems(plan(traced, *ENTRIES), promised) == says


def with_checkpoint(*modules: str, factory: str = "two_blocks") -> StepGraph:
    plan = replace(plan_of(factory), step=Step(checkpoint=parse_entries(list(modules), "test")))
    return capture_plan(plan, mesh_of(plan), 0)


def products(step: StepGraph, backward: bool) -> int:
    """Linears' forward products, by the part of the step that they stand in."""
    nodes = [node for node in step.graphs["joint"].graph.nodes if "addmm" in str(node.target)]
    return sum(is_backward(node) == backward for node in nodes)


def test_checkpointed_modules_alone_are_computed_again() -> None:
    """But for a block's last product, which nothing in its own backward needs."""
    assert [products(with_checkpoint(), backward) for backward in (False, True)] == [4, 0]
    assert [products(with_checkpoint("1"), backward) for backward in (False, True)] == [4, 1]
    assert [products(with_checkpoint("0", "1"), backward) for backward in (False, True)] == [4, 2]


def test_what_is_computed_again_reads_gathers_of_backward_each_once() -> None:
    step = with_checkpoint("1")
    names = sent_by(step)
    plain = ["0.2.weight", "1.0.weight", "1.2.weight"]  # 0.0 has no input whose gradient is asked for
    assert sorted(names[node] for node in launches(step, "all_gather", "backward")) == sorted([*plain, "1.0.bias"])
    assert len(launches(step, "all_gather", "forward")) == 8


def test_attention_without_dropout_draws_nothing_and_may_be_computed_again_as_a_module_without_parameters_may() -> None:
    step = with_checkpoint("1", factory="attention")
    targets = [str(node.target) for node in step.graphs["joint"].graph.nodes]
    assert sum("scaled_dot_product" in target and "backward" not in target for target in targets) == 2
    assert with_checkpoint("1.inner", factory="attention").parameters
