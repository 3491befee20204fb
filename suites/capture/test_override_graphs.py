"""What overridden modules leave in a plan's graph: calls with their modules' names, or sub-graphs, and never an anchor."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from pytest_fxbucket.capture.override.anchors import ANCHOR_FORWARD
from pytest_fxbucket.capture.override.expand import refuse_left_over
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.plan.schema_model import Optimizer
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.portable import decode, digest, encode_module
from pytest_fxbucket.step.roles import StepGraph
from pytest_fxbucket.step_runner import KEPT, StepTask, fields_of, update
from suites.capture import override_subgraphs as subgraphs
from suites.capture.override_plans import captured, override, plan_of
from suites.capture.steps import is_backward, launches, module_of, sent_by

CALLS = ("fxbucket.call_forward.default", "fxbucket.call_backward.default")


def calls(step: StepGraph) -> list[tuple[str, str | None, bool]]:
    """(operator, module, whether in backward) of each call of a real module, in order."""
    found = [node for node in step.graphs["joint"].graph.nodes if "fxbucket" in str(node.target)]
    return [(str(node.target).split(".")[1], module_of(node), is_backward(node)) for node in found]


def test_calls_have_their_modules_names_read_every_parameter_of_it_and_make_every_gradient() -> None:
    step = captured(plan_of("Deep", override(type="Chooses")))
    forward = [("call_forward", f"layers.{i}.1", False) for i in (0, 1)]
    backward = [("call_backward", f"layers.{i}.1", True) for i in (1, 0)]
    assert calls(step) == forward + backward
    reading = read_graph(step.graphs["joint"].graph, step.inputs["joint"], step.outputs["joint"])
    assert not reading.problems
    held = {p.fqn for p in step.parameters if ".low." in p.fqn or ".high." in p.fqn}
    assert len(held) == 8
    for direction in ("forward", "backward"):
        own = {sent_by(step)[node]: module_of(node) for node in launches(step, "all_gather", direction)}
        assert own["layers.0.1.low.weight"] == "layers.0.1.low"
        assert held <= {fqn for _, of, fqn in reading.computes if of == direction}


def test_a_call_of_a_module_without_parameters_counts_as_the_work_that_it_is() -> None:
    """Goldens list it with the entry whose parameter was read last."""
    step = captured(plan_of("holds Sorts", override(module="held")))
    reading = read_graph(step.graphs["joint"].graph, step.inputs["joint"], step.outputs["joint"])
    own = [i for i, node in enumerate(step.graphs["joint"].graph.nodes) if str(node.target) in CALLS]
    assert len(own) == 2
    assert set(own) <= {where for where, _, _ in reading.products}


def test_what_is_computed_again_calls_the_module_again_in_backward() -> None:
    step = captured(plan_of("Deep", override(module="layers.*.1"), checkpoint="layers.*"))
    assert [call for call in calls(step) if call[2]] == [
        ("call_backward", "layers.1.1", True),
        ("call_backward", "layers.0.1", True),
    ]
    graph = step.graphs["joint"].graph
    again = [node for node in graph.nodes if str(node.target) == CALLS[1]]
    forward = {node for node in graph.nodes if not is_backward(node) and node.op == "call_function"}
    assert not [source for node in again for source in node.args[3] if source in forward]


@pytest.mark.parametrize("checkpoint", ["layers.*", "layers.*.1"])
def test_each_backward_gets_the_digest_of_its_own_call_in_forward(checkpoint: str) -> None:
    """Of the first one, not of what is computed again for that backward."""
    step = captured(plan_of("Deep", override(module="layers.*.1"), checkpoint=checkpoint, microbatches=2))
    found = [node for node in step.graphs["joint"].graph.nodes if str(node.target) in CALLS]
    forward = [node for node in found if str(node.target) == CALLS[0] and not is_backward(node)]
    given = [node.args[7] for node in found if str(node.target) == CALLS[1]]
    assert len(forward) == 4
    assert {digest.args[0] for digest in given} == set(forward)
    assert [digest.args[1] for digest in given] == [1] * 4
    assert [(module_of(digest), is_backward(digest)) for digest in given] == [
        (module_of(digest.args[0]), False) for digest in given
    ]


def test_a_parameter_that_a_subgraph_does_not_read_is_neither_gathered_nor_reduced() -> None:
    step = captured(plan_of("holds Chooses", override("low_alone", module="held")))
    assert not calls(step)
    assert not [fqn for fqn in sent_by(step).values() if "high" in fqn]
    assert not [value.fqn for value in step.outputs["joint"] if "high" in value.fqn]
    assert [p.fqn for p in step.parameters if "high" in p.fqn] == ["held.high.weight", "held.high.bias"]


def test_what_a_subgraph_computes_has_its_modules_name_and_direction() -> None:
    step = captured(plan_of("Deep", override("counting", type="Chooses")))
    products = [
        node for node in step.graphs["joint"].graph.nodes if str(node.target) in ("aten.addmm.default", "aten.mm.default")
    ]
    own = [(module_of(node), is_backward(node)) for node in products if (module_of(node) or "").endswith(".1")]
    assert [own.count((f"layers.{i}.1", backward)) for i in (0, 1) for backward in (False, True)] == [2, 4, 2, 4]
    again = [sent_by(step)[node] for node in launches(step, "all_gather", "backward")]
    assert {f"layers.{i}.1.{name}.weight" for i in (0, 1) for name in ("low", "high")} <= set(again)


def test_state_of_a_subgraph_does_not_stand_for_an_optimizer_where_ranks_step() -> None:
    """Parameters would never move, and steps but the first would say nothing."""
    plan = plan_of("Deep", override("counting", type="Chooses"))
    step = captured(plan)
    assert not read_graph(step.graphs["joint"].graph, step.inputs["joint"], step.outputs["joint"]).updating
    fields = fields_of(plan, mesh_of(plan), step, "joint")
    assert dict(fields["first_state"]) == dict(step.first_state)
    stepping = StepTask(**fields)
    kept = [value for value in stepping.inputs if value.role in KEPT]
    state = [torch.zeros(value.shape, dtype=value.dtype) for value in kept]
    update(state, [torch.ones(value.shape, dtype=value.dtype) for value in stepping.outputs], stepping)
    moved = {value.fqn for value, tensor in zip(kept, state, strict=True) if bool(tensor.any())}
    assert moved == {value.fqn for value in stepping.outputs if value.role in ("grad", "state")}


def test_state_is_an_input_and_an_output_and_no_optimizers() -> None:
    subgraphs.ASKED.clear()
    plan = plan_of("Deep", override("counting", type="Chooses", start=5), microbatches=2)
    step = captured(plan, optimizer=(Optimizer("torch.optim:AdamW", {"fused": True}),))
    assert subgraphs.ASKED == ["Chooses", "Chooses"]
    names = ["layers.0.1.rows", "layers.1.1.rows"]
    for values in (step.inputs["joint"], step.outputs["joint"]):
        assert [value.fqn for value in values if value.role == "state" and value.fqn in names] == names
    assert {name: int(first) for name, first in step.first_state.items()} == dict.fromkeys(names, 5)
    assert list(step.first_state) == names
    reading = read_graph(step.graphs["joint"].graph, step.inputs["joint"], step.outputs["joint"])
    assert not reading.problems
    assert reading.updating
    assert not [update.fqn for update in reading.updates if "rows" in update.fqn]
    assert [told.done for told in step.transformed] == [tuple(f"layers.{i}.1 is overridden by counting" for i in (0, 1))]


def test_an_override_beside_what_tp_parts_has_the_refusal_of_tp() -> None:
    plan = plan_of("Deep", override(type="Chooses"), tp=2, tp_plan={"layers.*.0": "colwise"})
    with pytest.raises(CaptureError, match="tp"):  # the next module would have needed the whole: tp itself says so
        captured(plan)


def test_a_graph_with_calls_travels_and_is_the_same_on_every_rank() -> None:
    plan = plan_of("Deep", override(type="Chooses"))
    portable = encode_module(captured(plan).graphs["joint"])
    assert digest(encode_module(decode(portable))) == digest(portable)
    assert digest(encode_module(captured(plan).graphs["joint"])) == digest(portable)


def test_an_anchor_that_is_left_over_is_an_error_that_names_its_module() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    anchor = graph.call_function(ANCHOR_FORWARD, ("layers.0.moe", "{}", [], [x], 0))
    graph.output((anchor,))
    with pytest.raises(CaptureError, match=r"^the anchor of module layers\.0\.moe is left over \(anchor_forward"):
        refuse_left_over(graph)
    with pytest.raises(NotImplementedError):
        ANCHOR_FORWARD("layers.0.moe", "{}", [], [torch.ones(1)], 0)
