"""A pass may copy its graph, or have it traced again: nodes that it took over are then told by what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.invariants import broken_invariants
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.counted_anew import renamed, with_names_of_before
from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.passes.manual import manual_overlap_bucketing
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Model, Parallel
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.portable import own_copy

PLANS = ["tok_embeddings", "layers.0", ["norm", "output"]]
Bucketed = tuple[fx.GraphModule, fx.GraphModule]


@pytest.fixture(scope="module")
def bucketed() -> Bucketed:
    """A step of one layer, before the pass and behind it."""
    args = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1}
    model = Model("fixtures.models.llama:build", "fixtures.models.llama:batch", args, "fixtures.models.llama:loss")
    before = capture_plan(Plan(Path("plan.toml"), model=model, parallel=Parallel(dp_shard=4)), shard_mesh(4), 0).graphs["joint"]
    with fake_world(0, 4):
        return before, manual_overlap_bucketing(own_copy(before), PLANS)


def traced_again(module: fx.GraphModule) -> fx.Graph:
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with values[0].fake_mode:
        return make_fx(fx.Interpreter(module).run)(*values).graph


def movement_before(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes if moves_data(node) else []


def inputs(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def computing(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if computes(node)]


def test_a_graph_that_was_changed_in_place_is_taken_as_it_is(bucketed: Bucketed) -> None:
    before, after = bucketed
    assert with_names_of_before(before.graph, after.graph) is after.graph
    assert with_names_of_before(before.graph, before.graph) is before.graph


def test_nodes_of_a_graph_that_was_traced_again_have_their_names_back(bucketed: Bucketed) -> None:
    before, after = bucketed
    again = traced_again(after)
    named = with_names_of_before(before.graph, renamed(again, {node: f"x{node.name}" for node in inputs(again)}))
    assert [node.name for node in inputs(named)] == [node.name for node in inputs(before.graph)]
    assert computing(named) == computing(after.graph) == computing(before.graph)


def anew(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that numbers its nodes over all words, so that no call has the name that it had."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    names = {node: f"{operator_name(node).partition('::')[2]}_{at}" for at, node in enumerate(calls)}
    return fx.GraphModule(module, renamed(module.graph, names))


def test_inputs_alone_may_have_other_names(bucketed: Bucketed) -> None:
    before, after = bucketed
    named = with_names_of_before(before.graph, renamed(after.graph, {node: f"x{node.name}" for node in inputs(after.graph)}))
    assert [node.name for node in named.nodes] == [node.name for node in after.graph.nodes]


def test_a_graph_that_was_copied_before_buckets_were_made_is_known_again(bucketed: Bucketed) -> None:
    before, _ = bucketed
    with fake_world(0, 4):
        after = manual_overlap_bucketing(anew(own_copy(before)), PLANS)
    assert computing(with_names_of_before(before.graph, after.graph)) == computing(before.graph)
    assert broken_invariants(before, after) == []


@pytest.mark.parametrize("twin", [False, True])
def test_products_that_change_their_weights_are_told_from_each_other(twin: bool, bucketed: Bucketed) -> None:
    """Also where one product more stands anywhere, so that their number tells nothing."""
    before, after = bucketed[0], own_copy(bucketed[1])
    (one, other) = (
        next(node for node in after.graph.nodes if computes(node) and module_of(node) == f"layers.0.feed_forward.{name}")
        for name in ("w1", "w3")
    )
    if twin:
        with after.graph.inserting_after(other):
            after.graph.create_node("call_function", other.target, other.args, name="twin").meta = dict(other.meta)
    assert broken_invariants(before, anew(after)) == []
    one, other = (node.all_input_nodes[1] for node in (one, other))  # their weights, transposed
    one.args, other.args = other.args, one.args
    for copied in (anew(after), fx.Transformer(after).transform()):  # which says nothing of its nodes
        (said,) = broken_invariants(before, copied)
        assert "reads or makes layers.0.feed_forward.w3" in said


def test_what_the_pass_made_has_no_name_of_before(bucketed: Bucketed) -> None:
    """Else a launch of a bucket would be taken for one that was there, or an unpacking view for one of the model."""
    before, after = bucketed
    named = with_names_of_before(before.graph, anew(after).graph)
    was = {node.name: node for node in before.graph.nodes}
    # In one order: which of them have the names that they have in the graph that was changed in place?
    pairs = [(old, new) for old, new in zip(after.graph.nodes, named.nodes, strict=True) if old.name != new.name]
    assert not {new.name for _, new in pairs} & was.keys()
    lost = [old for old, _ in pairs if old.name in was]
    assert all(moves_data(node) and any(map(is_wait, reached([node], movement_before))) for node in lost), lost


def test_a_graph_that_was_traced_again_breaks_no_invariant() -> None:
    """Under cp the model assembles gradients: no launch of them could be followed, were they not found again."""
    plan = load_plans(Path(__file__).parents[2] / "fixtures/plans/cp.toml")[0]
    before = CapturedPlan(plan, mesh_of(plan)).before_pass(0).step.graphs["joint"]
    with fake_world(0, 4):
        after = manual_overlap_bucketing(own_copy(before), ["tok_embeddings", "layers.0", "layers.1", ["norm", "output"]])
    assert broken_invariants(before, fx.GraphModule(after, traced_again(after))) == []
