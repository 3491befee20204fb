"""The gradients of a captured step are those of plain eager, averaged over the ranks, or the step is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity import assert_same, by_hand, payload_of

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Model, Parallel, Plan, Step
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.roles import StepGraph


def plan_of(factory: str, *, step: Step | None = None, **args: Any) -> Plan:
    model = Model(f"eager_models:{factory}", "eager_models:batch", args, "eager_models:loss")
    return Plan(Path("plan.toml"), model=model, parallel=Parallel(dp_shard=2), step=step or Step())


def chunked(*, step: Step | None = None, **args: Any) -> Plan:
    """A loss that goes backward chunk by chunk in forward, and in a tied model again behind it."""
    model = Model("fixtures.models.chunked:build", "fixtures.models.chunked:batch", {"way": "backward", **args})
    return Plan(Path("plan.toml"), model=model, parallel=Parallel(dp_shard=2), step=step or Step())


def captured(plan: Plan) -> StepGraph:
    return capture_plan(plan, mesh_of(plan), 0)


EAGER = {
    "a weight whose norm is logged before it is used": plan_of("logs_first"),
    "a weight that is read in inference mode first": plan_of("infers_first"),
    "a weight that is logged first in a reentrant checkpoint": plan_of("logs_first_in_reentrant"),
    "reentrant checkpoints": plan_of("reentrant"),
    "reentrant checkpoints with dropout": plan_of("reentrant", dropout=0.5),
    "a reentrant checkpoint of the batch, which stops gradients": plan_of("reentrant_in_embedding"),
    "a layer shared by reentrant checkpoints": plan_of("Shared"),
    "checkpoints within checkpoints": plan_of("Nested"),
    "selective checkpoints with dropout": plan_of("selective"),
    "checkpoints with dropout": plan_of("saved", dropout=0.5),
    "checkpoints with dropout in microbatches": plan_of("saved", step=Step(microbatches=2), dropout=0.5),
    "[step] checkpoint with dropout": plan_of("plain", step=Step(checkpoint=parse_entries(["layers.*"], "test")), dropout=0.5),
    "checkpoints that draw anew": plan_of("draws_anew"),
    "a generator that is set back": plan_of("Reversible"),
    "hooks on gradients": plan_of("hooked"),
    "hooks on gradients in microbatches": plan_of("hooked", step=Step(microbatches=2)),
    "results written into zeros": plan_of("Recurrent"),
    "a recurrent layer": plan_of("Recurs"),
    "a parameter whose result is detached": plan_of("Detached"),
    "gradients that come turned": plan_of("Turned"),
    "backward within forward": chunked(),
    "backward within forward of what backward reaches again": chunked(tied=True),
    "backward within forward in microbatches": chunked(step=Step(microbatches=2)),
    "backward within forward in microbatches, reached again": chunked(step=Step(microbatches=2), tied=True),
    "attributes that change nothing": plan_of("between", name="Caches"),
}


@pytest.mark.parametrize("plan", EAGER.values(), ids=EAGER.keys())
def test_gradients_are_those_of_eager_averaged_over_the_ranks(plan: Plan, pools: Pools) -> None:
    share = by_hand(plan, "dp_shard", share=(0, 2, [0, 1]))
    assert_same(pools, payload_of(plan, captured(plan), **share), "by_hand:by_hand_steps")


def test_a_recurrent_layer_of_onednn_is_traced_as_what_runs() -> None:
    graph = captured(plan_of("OneDnnRecurs")).graphs["joint"].graph
    assert not [node for node in graph.nodes if "mkldnn" in str(node.target)]


def test_what_is_written_into_zeros_is_forward_with_its_gathers_in_order() -> None:
    step = captured(plan_of("Recurrent"))
    reading = read_graph(step.graphs["joint"].graph, step.inputs["joint"], step.outputs["joint"])
    gathers = [(one.direction, one.members[0].fqn) for one in reading.buckets if one.kind == "all_gather"]
    assert gathers[:8] == [("forward", fqn) for fqn in step_parameters(step)]


def step_parameters(step: StepGraph) -> list[str]:
    return [parameter.fqn for parameter in step.parameters]


REFUSED = {
    "hooked_behind": "parameter layers.1.0.weight has a hook of register_post_accumulate_grad_hook",
    "Clamps": "the root module or the loss writes a parameter in place (aten.clamp_.default)",
    "between:Chance": "module 1 draws from Python's random generator in forward",
    "between:OwnChance": "attribute generator of module 1",
    "between:Counts": "attribute calls of module 1",
    "between:Remembers": "attribute last of module 1",
    "between:Warms": "attribute is_warm of module 1",
    "between:Seeds": "the step calls torch.manual_seed",
}


@pytest.mark.parametrize(("factory", "said"), REFUSED.items(), ids=REFUSED.keys())
def test_what_a_graph_would_do_otherwise_is_refused_by_name(factory: str, said: str) -> None:
    name, _, module = factory.partition(":")
    with pytest.raises(CaptureError) as caught:
        captured(plan_of(name, **({"name": module} if module else {})))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
