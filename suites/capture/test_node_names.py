"""Names of nodes: an entry finds its launches by them, and every message about a graph speaks in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.graph.collectives import is_wait, launch_kind, waits_of
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.roles import StepGraph
from suites.capture.steps import captured, is_backward, launches, made_by, module_of, sent_by

PLANS = Path(__file__).resolve().parents[2] / "fixtures" / "plans"


ARGS: dict[str, dict[str, Any]] = {
    "uneven": {"blocks": 1},
    "hf_llama": {"layers": 1, "dim": 16},
    "llama_tied": {"layers": 1, "dim": 16, "tied": True},
}


@pytest.fixture(scope="module", params=ARGS)
def step(request: pytest.FixtureRequest) -> StepGraph:
    plan = load_plans(PLANS / f"{request.param}.toml")[0]
    assert plan.model is not None
    small = replace(plan, model=replace(plan.model, args=ARGS[request.param]), bucket=Bucket(unplanned="root"))
    return capture_plan(small, shard_mesh(4), 0)


def test_a_gather_is_named_after_the_module_that_owns_its_parameter(step: StepGraph) -> None:
    found = sent_by(step)
    assert len(found) == len(launches(step, "all_gather")) > 8
    assert {node.name: module_of(node) for node in found} == {n.name: fqn.rpartition(".")[0] for n, fqn in found.items()}


def test_a_reduction_is_named_after_the_module_that_owns_its_parameter(step: StepGraph) -> None:
    found = made_by(step)
    assert list(found.values()) == [parameter.fqn for parameter in step.parameters]
    assert {node.name: module_of(node) for node in found} == {n.name: fqn.rpartition(".")[0] for n, fqn in found.items()}


def test_a_wait_and_a_cast_have_the_name_of_their_launch(step: StepGraph) -> None:
    for kind in ("all_gather", "reduce_scatter"):
        for launch in launches(step, kind):
            (wait,) = waits_of(launch)
            assert (module_of(wait), is_backward(wait)) == (module_of(launch), is_backward(launch))
            source = launch.all_input_nodes[0]
            if "_to_copy" in str(source.target):
                assert (module_of(source), is_backward(source)) == (module_of(launch), is_backward(launch))


def test_directions_are_right(step: StepGraph) -> None:
    """What the loss depends on is forward, the rest backward, and the metadata says so."""
    graph = step.graphs["joint"].graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    returned = graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    forward = {returned[0]}
    for node in reversed(nodes):
        if node in forward:
            forward.update(node.all_input_nodes)
    assert [n.name for n in nodes if n in forward and is_backward(n)] == []
    assert [n.name for n in nodes if launch_kind(n) == "reduce_scatter" and not is_backward(n)] == []
    first_backward = next(i for i, node in enumerate(nodes) if is_backward(node))
    last_forward = max(i for i, node in enumerate(nodes) if not is_backward(node))
    assert last_forward < first_backward
    assert all(("fwd_nn_module_stack" in n.meta) == is_backward(n) != ("nn_module_stack" in n.meta) for n in nodes)


def test_nodes_of_compute_have_names(step: StepGraph) -> None:
    nodes = [n for n in step.graphs["joint"].graph.nodes if n.op == "call_function" and not is_wait(n)]
    assert sum(module_of(node) is None for node in nodes) == 0
    assert sum(bool(module_of(node)) for node in nodes) >= 0.95 * len(nodes)


def test_each_matmul_is_named_after_its_layer_in_both_directions() -> None:
    step = captured("residual", reshard_after_forward=False)
    matmuls = [node for node in step.graphs["joint"].graph.nodes if "mm" in str(node.target)]
    names = [(module_of(node), is_backward(node)) for node in matmuls]
    layers = ["layers.0", "layers.1", "layers.2", "head"]
    assert names[:4] == [(layer, False) for layer in layers]
    # of the first layer only the weight's gradient is computed: its input needs none
    assert names[4:] == [
        (layer, True) for layer in ["head", "head", "layers.2", "layers.2", "layers.1", "layers.1", "layers.0"]
    ]


def test_backward_of_a_module_without_parameters_has_its_name_and_not_its_neighbours() -> None:
    of_tanh = {
        factory: [module_of(n) for n in captured(factory).graphs["joint"].graph.nodes if "tanh" in str(n.target)]
        for factory in ("uneven", "residual")
    }
    assert of_tanh == {"uneven": ["1", "1"], "residual": [""] * 6}


def test_a_module_stack_goes_from_the_root_inwards() -> None:
    gather = next(node for node, fqn in sent_by(captured("residual")).items() if fqn == "layers.2.weight")
    stack = gather.meta["nn_module_stack"]
    assert list(stack) == ["", "layers", "layers.2"]
    assert [(path, cls.__name__) for path, cls in stack.values()] == [
        ("", "Residual"),
        ("layers", "ModuleList"),
        ("layers.2", "Linear"),
    ]
