"""Stages of the Llama of ``wrong_split_models`` with one fault each, in what was captured, or in what ranks are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture.clip import Clip
from pytest_fxbucket.pipeline.captured import StagedStep
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.pipelined import TIES, UPDATE, Crossing, Pipelined
from pytest_fxbucket.step.portable import own_copy
from pytest_fxbucket.step.roles import StepGraph, Value
from suites.pipeline.wrong_split_models import FACTOR

FIRST, SECOND, TOKENS = "add_3", "mul_14", "[0]"
"""What crosses the first cut: two activations of one shape, and what the last stage alone reads."""
W3 = "layers.0.feed_forward.w3.weight"
"""A parameter of stage 1."""
NORM = "layers.0.attention_norm.weight"
"""A parameter of all stages."""
aten = torch.ops.aten
Change = Callable[[StepGraph, int], StepGraph]


@dataclass(frozen=True)
class Changed(StagedStep):
    """Stages that are changed where a rank gets them."""

    change: Change = lambda step, _: step

    def of_rank(self, mesh: Mesh, rank: int) -> StepGraph:
        return self.change(super().of_rank(mesh, rank), mesh.at(rank, "pp"))


def parts(staged: StagedStep) -> dict[str, Any]:
    return {field.name: getattr(staged, field.name) for field in fields(StagedStep)}


def at(staged: StagedStep, place: int | None, change: Callable[[StepGraph], StepGraph]) -> StagedStep:
    """``staged`` with ``change`` of what the rank at ``place`` of pp gets, or every rank."""
    return Changed(**parts(staged), change=lambda step, own: change(step) if place in (None, own) else step)


def rerouted(how: Pipelined, way: str, cut: int, change: Callable[[list[Crossing]], list[Crossing]]) -> Pipelined:
    flows: list[tuple[Crossing, ...]] = list(getattr(how, way))
    flows[cut] = tuple(change(list(flows[cut])))
    return replace(how, **{way: tuple(flows)})


def everywhere(staged: StagedStep, way: str, cut: int, change: Callable[[list[Crossing]], list[Crossing]]) -> StagedStep:
    return replace(staged, pipelined=rerouted(staged.pipelined, way, cut, change))


def edited(
    step: StepGraph,
    phase: str,
    edit: Callable[[fx.Graph], None] = lambda _: None,
    inputs: Callable[[list[Value]], list[Value]] = list,
    outputs: Callable[[list[Value]], list[Value]] = list,
) -> StepGraph:
    module = own_copy(step.graphs[phase])
    edit(module.graph)
    module.graph.lint()
    module.recompile()
    return replace(
        step,
        graphs={**step.graphs, phase: module},
        inputs={**step.inputs, phase: tuple(inputs(list(step.inputs[phase])))},
        outputs={**step.outputs, phase: tuple(outputs(list(step.outputs[phase])))},
    )


def place_of(values: tuple[Value, ...], fqn: str) -> int:
    return next(index for index, value in enumerate(values) if value.fqn == fqn)


def returned(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]  # a graph of a part returns a list


def without_output(step: StepGraph, phase: str, fqn: str) -> StepGraph:
    index = place_of(step.outputs[phase], fqn)

    def edit(graph: fx.Graph) -> None:
        kept = returned(graph)
        del kept[index]
        graph.output_node().args = (kept,)

    return edited(step, phase, edit, outputs=lambda values: values[:index] + values[index + 1 :])


def instead(node: fx.Node, target: Any, *more: Any) -> fx.Node:
    """Let readers of ``node`` read ``target(node, *more)``."""
    with node.graph.inserting_before(next(iter(node.users))):
        made = node.graph.call_function(target, (node, *more))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def skip(graph: fx.Graph, target: Any, *more: Any) -> None:
    """Let readers of the one call of ``target`` with ``more`` read what it is given."""
    (node,) = (node for node in graph.nodes if node.target is target and node.args[1:] == (more or node.args[1:]))
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


# Where it is cut.


def another_module_cut_behind(staged: StagedStep) -> StagedStep:
    """Than the plan names."""
    assert staged.plan.pipeline is not None
    cuts = ("layers.0.feed_forward.w3", *staged.plan.pipeline.cuts[1:])
    return replace(staged, plan=replace(staged.plan, pipeline=replace(staged.plan.pipeline, cuts=cuts)))


# What crosses.


def bypass_dropped(staged: StagedStep) -> StagedStep:
    return everywhere(staged, "forward", 0, lambda flow: [one for one in flow if one.name != TOKENS])


def value_dropped(staged: StagedStep) -> StagedStep:
    return everywhere(staged, "forward", 0, lambda flow: [one for one in flow if one.name != FIRST])


def gradient_of_activation_dropped(staged: StagedStep) -> StagedStep:
    return everywhere(staged, "backward", 1, lambda flow: flow[:-1])


def received_by_a_stage_that_does_not_read_it(staged: StagedStep) -> StagedStep:
    return everywhere(staged, "backward", 0, lambda flow: [*flow, *staged.pipelined.backward[1]])


def swapped_by_the_sender(staged: StagedStep) -> StagedStep:
    def change(step: StepGraph) -> StepGraph:
        values = step.outputs["stage 0 forward"]
        one, other = place_of(values, FIRST), place_of(values, SECOND)

        def edit(graph: fx.Graph) -> None:
            given = returned(graph)
            given[one], given[other] = given[other], given[one]
            graph.output_node().args = (given,)

        return edited(step, "stage 0 forward", edit)

    return at(staged, 0, change)


def swapped_by_the_receiver(staged: StagedStep) -> StagedStep:
    def change(step: StepGraph) -> StepGraph:
        def swap(values: list[Value]) -> list[Value]:
            one, other = (place_of(tuple(values), name) for name in (FIRST, SECOND))
            values[one], values[other] = values[other], values[one]
            return values

        return edited(step, "stage 1 forward", inputs=swap)

    return at(staged, 1, change)


def another_order_on_one_rank(staged: StagedStep) -> StagedStep:
    return at(
        staged, 1, lambda step: replace(step, pipelined=rerouted(staged.pipelined, "forward", 0, lambda flow: flow[::-1]))
    )


def another_shape_on_one_rank(staged: StagedStep) -> StagedStep:
    def change(flow: list[Crossing]) -> list[Crossing]:
        return [replace(one, shape=(1, *one.shape[1:])) if one.name == "add_5" else one for one in flow]

    return at(staged, 2, lambda step: replace(step, pipelined=rerouted(staged.pipelined, "forward", 1, change)))


def another_stride_said(staged: StagedStep) -> StagedStep:
    def change(flow: list[Crossing]) -> list[Crossing]:
        return [replace(one, strides=(16, 32, 1)) if one.name == FIRST else one for one in flow]

    return everywhere(staged, "forward", 0, change)


def another_dtype_said(staged: StagedStep) -> StagedStep:
    def change(flow: list[Crossing]) -> list[Crossing]:
        return [replace(one, dtype=torch.int32) if one.name == FIRST else one for one in flow]

    return everywhere(staged, "forward", 0, change)


# Gradients and parameters.


def gradient_lost(staged: StagedStep) -> StagedStep:
    return at(staged, 1, lambda step: without_output(step, "stage 1 backward", W3))


def gradient_given_twice(staged: StagedStep) -> StagedStep:
    def change(step: StepGraph) -> StepGraph:
        phase = "stage 1 backward"
        index = place_of(step.outputs[phase], W3)

        def edit(graph: fx.Graph) -> None:
            given = returned(graph)
            graph.output_node().args = ([*given, given[index]],)

        return edited(step, phase, edit, outputs=lambda values: [*values, values[index]])

    return at(staged, 1, change)


def gradients_of_weights_in_both_parts(staged: StagedStep) -> StagedStep:
    return backward_as(staged, "stage 1 input", "stage 1 weight")


def gradients_of_weights_with_those_of_inputs(staged: StagedStep) -> StagedStep:
    return backward_as(staged, "stage 1 input")


def backward_as(staged: StagedStep, *phases: str) -> StagedStep:
    """Whole backward of stage 1 as each of ``phases``, of a schedule that has it in two."""
    staged = replace(staged, pipelined=replace(staged.pipelined, schedule="InterleavedZeroBubble"))

    def change(step: StepGraph) -> StepGraph:
        whole = staged.parted.part(1, "backward")
        return replace(
            step,
            graphs={**step.graphs, **dict.fromkeys(phases, whole.graph_module)},
            inputs={**step.inputs, **dict.fromkeys(phases, whole.inputs)},
            outputs={**step.outputs, **dict.fromkeys(phases, whole.outputs)},
        )

    return at(staged, 1, change)


def gradient_not_reduced(staged: StagedStep) -> StagedStep:
    return at(staged, 1, lambda step: without_output(step, "stage 1 reduce", W3))


def parameter_not_gathered(staged: StagedStep) -> StagedStep:
    return at(staged, 1, lambda step: without_output(step, "stage 1 unshard", W3))


def another_parameter_updated(staged: StagedStep) -> StagedStep:
    """On a rank that does not have it, instead of its own."""

    def renamed(values: list[Value]) -> list[Value]:
        return [replace(value, fqn="norm.weight") if value.fqn == W3 else value for value in values]

    return at(staged, 1, lambda step: edited(step, UPDATE, inputs=renamed, outputs=renamed))


@dataclass(frozen=True)
class OwnNorm(StagedStep):
    """Each rank clips by the norm of its own stages."""

    def _clip(self, mesh: Mesh) -> Clip | None:
        return self.model.clip(self.microbatch.parameters)


def clipped_over_the_own_stage(staged: StagedStep) -> StagedStep:
    return OwnNorm(**parts(staged))


# Ties.


def tie_not_summed(staged: StagedStep) -> StagedStep:
    def change(step: StepGraph) -> StepGraph:
        graphs, inputs, outputs = (
            {phase: one for phase, one in side.items() if phase != TIES} for side in (step.graphs, step.inputs, step.outputs)
        )
        return replace(step, graphs=graphs, inputs=inputs, outputs=outputs)

    return at(staged, None, change)


def tie_without_one_stage(staged: StagedStep) -> StagedStep:
    ties = tuple((fqn, (0, 2)) for fqn, _ in staged.pipelined.ties)
    return replace(staged, pipelined=replace(staged.pipelined, ties=ties))


def tie_summed_twice(staged: StagedStep) -> StagedStep:
    def change(step: StepGraph) -> StepGraph:
        def edit(graph: fx.Graph) -> None:
            given = returned(graph)
            index = place_of(step.outputs[TIES], NORM)
            with graph.inserting_before(graph.output_node()):
                total = graph.call_function(aten.add.Tensor, (given[index], given[index]))
            total.meta = dict(given[index].meta)
            given[index] = total
            graph.output_node().args = (given,)

        return edited(step, TIES, edit)

    return at(staged, None, change)


# What a stage computes.


def activation_computed_otherwise_in_backward(staged: StagedStep) -> StagedStep:
    def edit(graph: fx.Graph) -> None:
        (silu,) = (node for node in graph.find_nodes(op="placeholder") if node.name == "silu")
        instead(silu, aten.mul.Tensor, 1.5)

    return at(staged, 1, lambda step: edited(step, "stage 1 backward", edit))


def hook_before_forward_lost(staged: StagedStep) -> StagedStep:
    return at(staged, 0, lambda step: edited(step, "stage 0 forward", lambda graph: skip(graph, aten.flip.default)))


def hook_behind_forward_lost(staged: StagedStep) -> StagedStep:
    return at(staged, 2, lambda step: edited(step, "stage 2 forward", lambda graph: skip(graph, aten.mul.Tensor, FACTOR)))


def buffer_written_twice(staged: StagedStep) -> StagedStep:
    def edit(graph: fx.Graph) -> None:
        (write,) = (node for node in graph.nodes if node.target is aten.add_.Tensor)
        with graph.inserting_after(write):
            graph.call_function(write.target, write.args, write.kwargs).meta = dict(write.meta)

    return at(staged, 1, lambda step: edited(step, "stage 1 forward", edit))
