"""Modules of ``[step] checkpoint`` are computed again in backward, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

from steps import is_backward, launches, plan_of, sent_by

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Step
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.roles import StepGraph


def with_checkpoint(*modules: str) -> StepGraph:
    plan = replace(plan_of("two_blocks"), step=Step(checkpoint=parse_entries(list(modules), "test")))
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
