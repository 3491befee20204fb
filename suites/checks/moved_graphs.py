"""Changes of set-up, steady and clean-up graphs that each break one thing, for tests of audit and bitwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph.collectives import is_reduce_scatter, is_wait
from pytest_fxbucket.step.roles import Phase, StepGraph
from pytest_fxbucket.transforms import transformation
from pytest_fxbucket.transforms.next_iteration import next_iteration

State = dict[str, torch.Tensor]
ENTRIES = ["c", "d"]


def inputs(step: StepGraph, phase: Phase) -> dict[tuple[str, str], fx.Node]:
    nodes = step.graphs[phase].graph.find_nodes(op="placeholder")
    return {(v.role, v.fqn): node for node, v in zip(nodes, step.inputs[phase], strict=True)}


def results(step: StepGraph, phase: Phase) -> dict[tuple[str, str], Any]:
    returned: Any = step.graphs[phase].graph.output_node().args[0]
    return {(v.role, v.fqn): node for node, v in zip(returned, step.outputs[phase], strict=True)}


def give(step: StepGraph, phase: Phase, changed: dict[tuple[str, str], Any]) -> None:
    now = results(step, phase) | changed
    step.graphs[phase].graph.output_node().args = ([now[v.role, v.fqn] for v in step.outputs[phase]],)


def rates(step: StepGraph) -> list[str]:
    """Names of those that are carried."""
    return [fqn for role, fqn in inputs(step, "cleanup") if role == "carried" and fqn.endswith(".lr")]


def rate_of_this_call(step: StepGraph) -> None:
    """What is done for the call before uses this call's learning rate."""
    given = inputs(step, "steady")
    for fqn in rates(step):
        given["carried", fqn].replace_all_uses_with(given["hyper", fqn])
    step.graphs["steady"].graph.lint()


def rate_of_the_first_call(step: StepGraph) -> None:
    """Steady hands on the learning rate that it was given, for ever."""
    for fqn in rates(step):
        give(step, "steady", {("carried", fqn): inputs(step, "steady")["carried", fqn]})


def rate_not_copied(step: StepGraph) -> None:
    """The learning rate is handed on as the very tensor that a scheduler writes to."""
    for phase in ("setup", "steady"):
        for fqn in rates(step):
            give(step, phase, {("carried", fqn): inputs(step, phase)["hyper", fqn]})


def swapped(step: StepGraph) -> None:
    """Two gradients of one shape are handed on in each other's place."""
    for phase in ("setup", "steady"):
        (a, x), (b, y) = pair_of(step, phase)
        give(step, phase, {a: y, b: x})


def pair_of(step: StepGraph, phase: Phase) -> list[tuple[tuple[str, str], Any]]:
    first: dict[tuple[int, ...], tuple[tuple[str, str], Any]] = {}
    for value in step.outputs[phase]:
        if value.role == "carried" and not value.fqn.endswith(".lr"):
            found = ((value.role, value.fqn), results(step, phase)[value.role, value.fqn])
            if value.shape in first:
                return [first[value.shape], found]
            first[value.shape] = found
    raise AssertionError("no two gradients have one shape")


def not_updated(step: StepGraph) -> None:
    """Steady leaves a parameter as it was."""
    key = first_param(step)
    give(step, "steady", {key: inputs(step, "steady")[key]})


def old_parameter(step: StepGraph) -> None:
    """A gather sends the parameter as the call before found it."""
    key = first_param(step)
    new, old = results(step, "steady")[key], inputs(step, "steady")[key]
    for user in list(new.users):
        if user.op != "output":
            user.replace_input_with(new, old)


def first_param(step: StepGraph) -> tuple[str, str]:
    return next((v.role, v.fqn) for v in step.outputs["cleanup"] if v.role == "param")


def waited_for_at_once(step: StepGraph) -> None:
    """Right behind its launch, with what follows: nothing hides the reduction."""
    graph = step.graphs["steady"].graph
    launch = next(node for node in graph.nodes if is_reduce_scatter(node))
    launch.append(next(user for user in launch.users if is_wait(user)))


def launched_late(step: StepGraph) -> None:
    """Right before its wait."""
    graph = step.graphs["steady"].graph
    for launch in [node for node in graph.nodes if is_reduce_scatter(node)][:1]:
        next(user for user in launch.users if is_wait(user)).prepend(launch)


def reduced_in_setup(step: StepGraph) -> None:
    """A reduction that moved stands in set-up too."""
    graph = step.graphs["setup"].graph
    made = results(step, "setup")["carried", first_param(step)[1]]
    launch = next(node for node in step.graphs["cleanup"].graph.nodes if is_reduce_scatter(node))
    with graph.inserting_before(graph.output_node()):
        again = graph.call_function(launch.target, (made, *launch.args[1:]))
        again.meta["val"] = launch.meta["val"]
        wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (again,))
        wait.meta["val"] = launch.meta["val"]


BROKEN = {
    change.__name__: change
    for change in (
        *(rate_of_this_call, rate_of_the_first_call, rate_not_copied, swapped, not_updated, old_parameter),
        *(waited_for_at_once, launched_late, reduced_in_setup),
    )
}


@transformation(after=("bucket",), keeps_collectives=False, crosses_iterations=True)
def broken_iteration(step: StepGraph, state: State, *, entries: Sequence[Any], change: str) -> StepGraph:
    """next_iteration, and then something wrong."""
    after = next_iteration(step, state, entries=entries)
    BROKEN[change](after)
    for graph_module in after.graphs.values():
        graph_module.graph.lint()
        graph_module.recompile()
    return after


@transformation(after=("bucket",), keeps_collectives=False, crosses_iterations=True)
def moving_more(step: StepGraph, state: State, *, entries: Sequence[Any]) -> StepGraph:
    """next_iteration of an entry that nobody asked for, too."""
    return next_iteration(step, state, entries=[*entries, "b"])
