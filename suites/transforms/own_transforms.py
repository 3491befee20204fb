"""Transformations of a user, right and wrong ones, as plans name them."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.collectives import is_wait, launch_kind
from pytest_fxbucket.step.roles import StepGraph, Transformed, Value
from pytest_fxbucket.transforms import transformation

State = dict[str, torch.Tensor]
COUNT = "calls"


def same(step: StepGraph, state: State) -> StepGraph:
    return step


early = transformation(before=("bucket",))(lambda step, state: step)
late = transformation(after=("bucket", "own_transforms:early"))(lambda step, state: step)
rounding = transformation(rounds="adds otherwise")(lambda step, state: step)
crossing = transformation(crosses_iterations=True)(lambda step, state: step)
updating = transformation(needs=("optimizer",))(lambda step, state: step)


def telling(step: StepGraph, state: State, *, word: str) -> StepGraph:
    return replace(
        step,
        transformed=(*step.transformed, Transformed("telling", (f"said {word}",), (("a launch", "it was not asked for"),))),
    )


def saying(step: StepGraph, state: State) -> StepGraph:
    raise PassError("there is nothing to say")


def one_rate(step: StepGraph, state: State) -> StepGraph:
    """Every parameter group is updated with the learning rate of the first."""
    graph = step.graphs["joint"].graph
    values = zip(graph.find_nodes(op="placeholder"), step.inputs["joint"], strict=True)
    first, *others = [node for node, value in values if value.role == "hyper"]
    for other in others:
        other.replace_all_uses_with(first)
    return step


def counting(step: StepGraph, state: State) -> StepGraph:
    """Counts its calls, in state of its own."""
    graph = step.graphs["joint"].graph
    value = Value("state", COUNT, (), torch.float64)
    first = graph.find_nodes(op="placeholder")[0]
    with graph.inserting_before(first):
        count = graph.placeholder("calls")
        count.meta["val"] = first.meta["val"].new_empty((), dtype=torch.float64)
    output = graph.output_node()
    with graph.inserting_before(output):
        more = graph.call_function(torch.ops.aten.add.Scalar, (count, 1.0))
        more.meta["val"] = count.meta["val"]
    output.args = ([*output.args[0], more],)  # type: ignore[misc]  # a list of nodes
    state[COUNT] = torch.zeros((), dtype=torch.float64)
    return replace(step, inputs={"joint": (value, *step.inputs["joint"])}, outputs={"joint": (*step.outputs["joint"], value)})


def _launches(step: StepGraph, kind: str) -> list[fx.Node]:
    return [node for node in step.graphs["joint"].graph.nodes if launch_kind(node) == kind]


def not_waiting(step: StepGraph, state: State) -> StepGraph:
    """The first thing gathered is read before it is there."""
    launch = _launches(step, "all_gather")[0]
    (wait,) = (user for user in launch.users if is_wait(user))
    wait.replace_all_uses_with(launch, lambda user: not is_wait(user))
    return step


def forgetting(step: StepGraph, state: State) -> StepGraph:
    """The gradient of the first reduction is another one of its shape."""
    first, second = _same_shape(_launches(step, "reduce_scatter"))
    (lost,), (kept,) = first.users, second.users
    lost.replace_all_uses_with(kept)
    step.graphs["joint"].graph.erase_node(lost)
    step.graphs["joint"].graph.erase_node(first)
    return step


@transformation(keeps_collectives=False)
def forgetting_with_leave(step: StepGraph, state: State) -> StepGraph:
    return forgetting(step, state)


def swapping(step: StepGraph, state: State) -> StepGraph:
    """Two parameters of one shape are gathered for each other."""
    first, second = _same_shape(_launches(step, "all_gather"))
    (a,), (b,) = first.all_input_nodes, second.all_input_nodes
    first.replace_input_with(a, b)
    second.replace_input_with(b, a)
    return step


def by_rank(step: StepGraph, state: State) -> StepGraph:
    """Rank 1 launches its first two reductions the other way round."""
    if dist.get_rank() == 1:
        first, second = _same_shape(_launches(step, "reduce_scatter"), same=False)
        second.append(first)
        for user in sorted(first.users, reverse=True):
            if user < first:
                first.append(user)
    return step


def _with_a_node(step: StepGraph, factor: float) -> StepGraph:
    graph = step.graphs["joint"].graph
    first, *_, last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last):
        graph.call_function(torch.ops.aten.mul.Scalar, (first, factor)).meta["val"] = first.meta["val"]
    return step


def _is_tested() -> bool:
    return "PYTEST_CURRENT_TEST" in os.environ


def by_environment(step: StepGraph, state: State) -> StepGraph:
    return _with_a_node(step, 1.0 if _is_tested() else 2.0)


def only_in_ci(step: StepGraph, state: State) -> StepGraph:
    return _with_a_node(step, float(os.environ["FXBUCKET_OWN"]))


def each_time(step: StepGraph, state: State) -> StepGraph:
    _CALLS.append(None)
    return _with_a_node(step, len(_CALLS))


_CALLS: list[None] = []


def drawing(step: StepGraph, state: State) -> StepGraph:
    """Begins to count anywhere."""
    step = counting(step, state)
    state[COUNT] = torch.rand((), dtype=torch.float64)
    return step


def counting_by_environment(step: StepGraph, state: State) -> StepGraph:
    step = counting(step, state)
    state[COUNT] += _is_tested()
    return step


def one_more(step: StepGraph, state: State) -> StepGraph:
    """In place."""
    state[COUNT].add_(1)
    return step


def filled_by_environment(step: StepGraph, state: State) -> StepGraph:
    state[COUNT].fill_(_is_tested())
    return step


def marking(step: StepGraph, state: State) -> StepGraph:
    """Leaves what no rank can be sent."""

    def marker(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    step = _with_a_node(step, 1.0)
    _marked(step).target = marker
    return step


def unmarking(step: StepGraph, state: State) -> StepGraph:
    _marked(step).target = torch.ops.aten.mul.Scalar
    return step


def _marked(step: StepGraph) -> fx.Node:
    return next(node for node in step.graphs["joint"].graph.nodes if node.op == "call_function")


@transformation(rounds="by rank")
def rounding_by_rank(step: StepGraph, state: State) -> StepGraph:
    return _with_a_node(step, dist.get_rank())


def raising(step: StepGraph, state: State) -> StepGraph:
    raise ValueError("no such thing here")


def nothing(step: StepGraph, state: State) -> None:
    """Forgets to give the step back."""


def _same_shape(launches: list[fx.Node], same: bool = True) -> tuple[fx.Node, fx.Node]:
    for n, a in enumerate(launches):
        for b in launches[n + 1 :]:
            if (a.meta["val"].shape == b.meta["val"].shape) is same and a.all_input_nodes != b.all_input_nodes:
                return a, b
    raise AssertionError("no two launches of one shape")
