"""How parameters travel in a captured step: when they are gathered, in what dtype, and how gradients come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.graph.collectives import argument, waits_of
from pytest_fxbucket.graph.ops import is_view
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.step.roles import StepGraph
from suites.capture.steps import captured, is_backward, launches, made_by, module_of, sent_by

LAYERS = ["layers.0", "layers.1", "layers.2", "head"]
WEIGHTS = [f"{layer}.weight" for layer in LAYERS]


@pytest.fixture(scope="module")
def residual() -> StepGraph:
    return captured("residual")


def gathered(step: StepGraph, direction: str) -> list[str]:
    """FQNs in order of launch."""
    return [fqn for node, fqn in sent_by(step).items() if is_backward(node) == (direction == "backward")]


def readers(node: fx.Node) -> list[fx.Node]:
    """Compute that reads what ``node``'s wait gives, through views."""
    found: list[fx.Node] = []
    for wait in waits_of(node) or [node]:
        for user in wait.users:
            found += readers_of_view(user) if is_view(user) else [user]
    return found


def readers_of_view(view: fx.Node) -> list[fx.Node]:
    return [r for user in view.users for r in (readers_of_view(user) if is_view(user) else [user])]


def test_a_layer_is_gathered_after_the_layer_before_it_has_computed(residual: StepGraph) -> None:
    nodes = list(residual.graphs["joint"].graph.nodes)
    order = [
        (module_of(n), "gather" if "all_gather" in str(n.target) else "compute")
        for n in nodes
        if not is_backward(n) and ("all_gather" in str(n.target) or "addmm" in str(n.target))
    ]
    assert order == [(layer, what) for layer in LAYERS for what in ("gather", "gather", "compute")]


def test_reductions_start_during_backward_and_not_at_its_end(residual: StepGraph) -> None:
    nodes = list(residual.graphs["joint"].graph.nodes)
    last_matmul = max(i for i, n in enumerate(nodes) if "mm" in str(n.target))
    before = [n for n in nodes[:last_matmul] if "reduce_scatter" in str(n.target)]
    assert len(before) == 6  # of 8: all but the first layer's


def test_resharding_gathers_again_exactly_what_backward_reads(residual: StepGraph) -> None:
    assert gathered(residual, "forward") == [f"{layer}.{name}" for layer in LAYERS for name in ("weight", "bias")]
    # a bias is not read in backward, and the first layer's weight is not either, since its input needs no gradient
    assert gathered(residual, "backward") == WEIGHTS[:0:-1]
    for node in launches(residual, "all_gather"):
        directions = {is_backward(reader) for reader in readers(node)}
        assert directions == {is_backward(node)}, f"{node.name} serves both directions"


def test_what_is_cast_or_taken_apart_in_forward_is_gathered_and_cast_again_in_backward() -> None:
    step = captured("Casts")
    (reading,) = (read_graph(g.graph, step.inputs[p], step.outputs[p]) for p, g in step.graphs.items())
    kept = [bucket.fqns for bucket in reading.buckets if bucket.direction == "forward" and bucket.backward_use is not None]
    assert kept == []
    assert gathered(step, "backward") == ["rows", "second.weight"]


def test_a_parameter_gathered_again_is_gathered_just_before_its_first_reader(residual: StepGraph) -> None:
    nodes = list(residual.graphs["joint"].graph.nodes)
    for node in launches(residual, "all_gather", "backward"):
        between = nodes[nodes.index(node) : min(map(nodes.index, readers(node)))]
        assert [n.name for n in between if not is_view(n) and n is not node and n not in waits_of(node)] == []


def test_a_layer_that_is_called_often_is_gathered_once_a_direction() -> None:
    step = captured("Repeated")
    assert gathered(step, "forward") == ["layer.weight", "layer.bias"]
    assert gathered(step, "backward") == ["layer.weight"]
    (again,) = launches(step, "all_gather", "backward")
    assert len(readers(again)) == 2
    assert [is_backward(r) for n in launches(step, "all_gather", "forward") for r in readers(n)] == [False] * 6
    assert sorted(made_by(step).values()) == ["layer.bias", "layer.weight"]


def test_kept_parameters_are_gathered_once_for_both_directions() -> None:
    step = captured("residual", reshard_after_forward=False)
    assert gathered(step, "backward") == []
    both = [fqn for n, fqn in sent_by(step).items() if {is_backward(r) for r in readers(n)} == {False, True}]
    assert both == WEIGHTS[1:]


@pytest.mark.parametrize("reshard", [True, False])
def test_a_tied_parameter_is_gathered_once_a_direction_and_has_one_gradient(reshard: bool) -> None:
    step = captured("Tied", reshard_after_forward=reshard)
    assert [(p.fqn, p.aliases) for p in step.parameters] == [("first.weight", ("last.weight",))]
    assert [value.role for value in step.inputs["joint"]] == ["param", "batch"]
    assert gathered(step, "forward") == ["first.weight"]
    assert gathered(step, "backward") == ["first.weight"] * reshard
    assert list(made_by(step).values()) == ["first.weight"]
    assert len(launches(step, "reduce_scatter")) == 1


def test_a_frozen_parameter_has_no_reduction_and_no_gradient() -> None:
    step = captured("frozen")
    assert [p.fqn for p in step.parameters if not p.trainable] == ["layers.0.weight", "layers.0.bias"]
    assert gathered(step, "forward")[:2] == ["layers.0.weight", "layers.0.bias"]
    trained = ["layers.1.weight", "layers.1.bias", "head.weight", "head.bias"]
    assert sorted(made_by(step).values()) == sorted(trained)
    assert len(launches(step, "reduce_scatter")) == 4
    assert [value.fqn for value in step.outputs["joint"]] == ["", *trained]


def test_a_parameter_that_forward_does_not_read_is_an_input_and_nothing_else() -> None:
    step = captured("Odd")
    assert next(v.fqn for v in step.inputs["joint"]) == "spare"
    assert "spare" not in gathered(step, "forward")
    assert "spare" not in [value.fqn for value in step.outputs["joint"]]


def test_uneven_shards_are_padded_on_the_way_in_and_cut_on_the_way_out() -> None:
    step = captured("uneven")
    assert [(p.shape, p.shard_shape) for p in step.parameters[:2]] == [((5, 8), (2, 8)), ((5,), (2,))]
    for node, fqn in sent_by(step).items():
        rows = next(p.shape[0] for p in step.parameters if p.fqn == fqn)
        wait = waits_of(node)[0]
        if rows == 5:
            assert (wait.meta["val"].shape[0], [u.meta["val"].shape[0] for u in wait.users]) == (8, [5])
    for node, fqn in made_by(step).items():
        (source,) = node.all_input_nodes
        rows = next(p.shape[0] for p in step.parameters if p.fqn == fqn)
        assert source.meta["val"].shape[0] == (8 if rows == 5 else rows)
        assert ("pad" in str(source.target)) == (rows == 5)


@pytest.mark.parametrize(
    ("asked", "gather", "reduce"),
    [
        ({}, torch.float32, torch.float32),
        ({"param_dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, torch.bfloat16, torch.float32),
        ({"reduce_dtype": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"param_dtype": "float32", "reduce_dtype": "float32"}, torch.float32, torch.float32),
    ],
)
def test_dtypes_are_those_asked_for(asked: dict[str, Any], gather: torch.dtype, reduce: torch.dtype) -> None:
    step = captured("residual", **asked)
    assert {node.meta["val"].dtype for node in launches(step, "all_gather")} == {gather}
    assert {node.meta["val"].dtype for node in launches(step, "reduce_scatter")} == {reduce}
    casts = [n for n in launches(step, "all_gather") if n.all_input_nodes[0].op != "placeholder"]
    assert len(casts) == (len(launches(step, "all_gather")) if gather != torch.float32 else 0)
    assert {value.dtype for value in step.outputs["joint"] if value.role == "grad"} == {torch.float32}
    returned = step.graphs["joint"].graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    assert {node.meta["val"].dtype for node in returned if isinstance(node, fx.Node)} == {torch.float32}


def test_parameters_of_two_dtypes_keep_their_own() -> None:
    step = captured("two_dtypes", batch="half_batch")
    found = {fqn: node.meta["val"].dtype for node, fqn in sent_by(step).items()}
    assert found["0.weight"] == torch.bfloat16
    assert found["2.weight"] == torch.float32
    assert {fqn: n.meta["val"].dtype for n, fqn in made_by(step).items()} == found


def test_gradients_are_averaged_over_the_whole_mesh() -> None:
    step = captured("residual", ranks=64)
    said = {(argument(n, "reduce_op"), argument(n, "group_size")) for n in launches(step, "reduce_scatter")}
    assert said == {("avg", 64)}
    assert {argument(n, "group_size") for n in launches(step, "all_gather")} == {64}
