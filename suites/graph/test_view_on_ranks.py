"""A module's part of a plan's step that launches collectives runs on ranks, with the process groups of the plan's mesh."""

from __future__ import annotations

import copy

import pytest
import torch

from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph_view import GraphView, SubGraph
from pytest_fxbucket.step.roles import StepGraph
from suites.graph.view_running import Runner, drawn

HYBRID = pytest.mark.fxbucket_plan("fixtures/plans/hybrid.toml")


@pytest.fixture
def layer(fxbucket_graph: StepGraph) -> SubGraph:
    return GraphView.of_step(fxbucket_graph).layers[1].subgraph("forward")


@HYBRID
@pytest.mark.fxbucket_ranks(4)
def test_a_layer_of_a_plan_s_step_runs_in_a_test_on_ranks(layer: SubGraph) -> None:
    values = [drawn(i, node.meta["val"]) for i, node in enumerate(layer.inputs)]  # the same on every rank
    results = layer(*values)
    assert len(results) == len(layer.outputs) > 0
    assert all(map(torch.equal, results, Runner(layer.graph_module).run(*values)))
    assert all(map(torch.equal, layer(*values), results))  # again, with the groups that are there now


@HYBRID
@pytest.mark.fxbucket_ranks(2)
def test_a_layer_on_another_number_of_ranks_is_refused(layer: SubGraph) -> None:
    with pytest.raises(GraphError, match=r"^layers.1 in forward launches collectives on 4 ranks, and is called on 2$"):
        layer()


@HYBRID
def test_a_layer_in_pytest_s_own_process_says_where_to_call_it(layer: SubGraph) -> None:
    with pytest.raises(GraphError, match=r"this process is no rank; call it .* marked fxbucket_ranks\(4\)"):
        layer()
    assert copy.copy(layer) == layer
