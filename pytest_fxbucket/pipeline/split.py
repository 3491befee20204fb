"""From a model and module paths to stages: traces forward, finds the cuts and what crosses, makes a graph of each part.

What crosses is all that is made before a cut and read behind it, each as a value of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from pytest_fxbucket.capture.functionalize import make_functional
from pytest_fxbucket.capture.names import Call
from pytest_fxbucket.compat.modules import forward_hooks
from pytest_fxbucket.errors import StageError
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.flops import flops_of
from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.graph.ops import held_by, returned
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.pipeline.cut import cut_places
from pytest_fxbucket.pipeline.hooks import Hooks, hooks_of
from pytest_fxbucket.pipeline.stages import Stage, Stages, Summary
from pytest_fxbucket.pipeline.trace import PLACE, WITHOUT_GRAD, Forward, take_graph, trace_forward
from pytest_fxbucket.pipeline.values import called_with
from pytest_fxbucket.step.pipelined import Crossing

if TYPE_CHECKING:
    from torch import fx


def stage_of_each(graph: fx.Graph, places: Sequence[int]) -> dict[fx.Node, int]:
    """The stage of each node of ``graph``, in graph order, along which stages never descend; there is one more than ``places``.

    A node that a rewrite put in has the place of the node that it replaces. Where it stands behind nodes of a later stage, it
    is of that later stage.
    """
    nodes = list(graph.nodes)
    own = [bisect_right(places, node.meta[PLACE]) for node in nodes]
    return dict(zip(nodes, accumulate(own, max), strict=True))


def crossing(
    stages: Mapping[fx.Node, int], everywhere: Collection[fx.Node], count: int, at_the_end: Collection[fx.Node] = ()
) -> list[list[fx.Node]]:
    """For each cut between ``count`` stages the nodes whose values cross it, in graph order.

    A value crosses all cuts from the stage that makes it to the last that reads it. What is ``everywhere`` crosses none: each
    stage has the model's parameters and buffers that it reads. What is wanted ``at_the_end`` crosses all.
    """
    last = {node: max((stages[user] for user in node.users), default=0) for node in stages}
    last |= dict.fromkeys(at_the_end, count - 1)
    moving = [node for node in stages if node not in everywhere and last[node] > stages[node]]
    return [[node for node in moving if stages[node] <= cut < last[node]] for cut in range(count - 1)]


def write_in_one_stage(forward: Forward, places: Sequence[int]) -> None:
    """Replace writes to memory that another stage made by functional operators, whose results can cross as values.

    A write in the stage that made the memory stays in place: that stage runs it as the model does. Raises :class:`StageError`
    for a write to a buffer, a parameter or an argument that a second stage has too and would not see written.
    """
    graph = forward.graph_module.graph
    stages, order = stage_of_each(graph, places), order_of(graph)
    writers = {node: {s for arg in args for s in order.storages(arg)} for node in stages if (args := written_arguments(node))}
    if not writers:
        return
    kept = _refuse_kept(forward, stages, order, writers)
    # A storage is made in the stage of its first node. If one write to it is in another stage, all writes to it become
    # functional: a write in place would not reach the value that a functional write put in its place.
    made: dict[int, int] = {}
    for node, stage in stages.items():
        for storage in order.storages(node):
            made.setdefault(storage, stage)
    moved = {s for node, storages in writers.items() for s in storages - kept if stages[node] != made[s]}
    across = {node: storages for node, storages in writers.items() if storages & moved}
    if both := [node for node, storages in across.items() if storages & kept]:
        raise StageError(
            f"{both[0].target} ({both[0].name}) writes at once what its stage has and what another stage made; write one by one"
        )
    make_functional(graph, across)


def _refuse_kept(
    forward: Forward, stages: Mapping[fx.Node, int], order: Order, writers: Mapping[fx.Node, set[int]]
) -> set[int]:
    """Storages of parameters, buffers and arguments; raises :class:`StageError` if two stages see one that is written."""
    names = {**{node: f"argument {path}" for node, path in forward.batch.items()}, **forward.parameter_nodes}
    kept = {storage: node for node in names for storage in order.storages(node)}
    for node, storages in writers.items():
        for storage in sorted(storages & kept.keys()):
            owner = kept[storage]
            # Arguments count as seen in the first stage, which receives them from the caller even if it reads none.
            seen = {stages[order.nodes[i]] for i in order.readers(storage)} | ({0} if owner in forward.batch else set())
            if others := sorted(seen - {stages[node]}):
                raise StageError(
                    f"{names[owner]} is written in place in stage {stages[node]} ({node.target}) and is in stage {others[0]}, "
                    "too, which has its own; put the cut where one stage has it alone"
                )
    return set(kept)


# Stages: a graph of each part between two cuts.


def split_stages(model_or_graph: nn.Module, cuts: Sequence[str], example_inputs: Any) -> Stages:
    """Cut a model into one stage more than ``cuts``, which are module paths: a stage ends behind the one call of each.

    ``example_inputs`` are the arguments of a call: a tuple, a dict of them by name, or the one tensor. The stages are traced
    for that call: other calls may differ from it only in the values of tensors. A ``GraphModule`` that is flat, with module
    stacks on its nodes (as ``torch.export.export(...).module()``), is cut likewise.

    Raises :class:`StageError` for cuts that do not part the model, :class:`CaptureError` for a model that cannot be traced.
    """
    forward, (args, kwargs) = forward_of(model_or_graph, example_inputs), called_with(example_inputs)
    return split_forward(forward, cuts, hooks_of(forward.root, forward.signature, forward.leaves, args, kwargs))


def split_forward(forward: Forward, cuts: Sequence[str], hooks: Hooks | None = None) -> Stages:
    """The stages of a forward that is traced already; they take over its graph, and ``hooks`` run around them.

    Raises :class:`StageError`.
    """
    places = cut_places(cuts, forward.calls, forward.modules, work_of(forward))
    write_in_one_stage(forward, places)
    stages = stage_of_each(forward.graph_module.graph, places)
    everywhere = {node for node in stages if node in forward.parameter_nodes or node.op == "get_attr"}
    # Forward hooks of the model run on the last stage and are given the arguments, so all of the batch must get there.
    seen = [*forward.batch] if hooks is not None and forward_hooks(forward.root) else []
    # Stage i receives flows[i] and sends flows[i + 1]. The last sends nothing: it gives the model's result.
    flows = [[*forward.batch], *crossing(stages, everywhere, len(cuts) + 1, seen), []]
    described = {node: _described(node, stages[node], forward) for flow in flows for node in flow}
    made = []
    for index, (receives, sends) in enumerate(pairwise(flows)):
        own = [
            node for node, stage in stages.items() if stage == index and node.op not in ("placeholder", "get_attr", "output")
        ]
        # In a tuple, since a model may give None itself.
        result = (forward.result,) if index == len(cuts) else None
        gives = sends if result is None else returned(forward.graph_module.graph.output_node())
        read = {source for node in own for source in node.all_input_nodes}.union([*gives, *seen] if result else ())
        held = list(dict.fromkeys(fqn for node, fqn in forward.parameter_nodes.items() if node in read))
        summary = Summary(
            index=index,
            modules=_modules(forward, places, index),
            parameters=tuple(fqn for fqn in held if fqn in forward.parameters),
            buffers=tuple(fqn for fqn in held if fqn not in forward.parameters),
            receives=tuple(map(described.__getitem__, receives)),
            sends=tuple(map(described.__getitem__, sends)),
            read=tuple(described[node] for node in receives if node in read),
            flops=sum(map(flops_of, own)),
        )
        part = _part(forward, held, receives, own, gives)
        made.append(Stage(summary, part, forward.root, held, result, hooks if index in (0, len(cuts)) else None))
    read_in_any = {fqn for stage in made for fqn in stage.held}
    unread = [fqn for fqn in (*forward.parameters, *forward.buffers) if fqn not in read_in_any]
    return Stages(made, forward.signature, forward.leaves, unread)


def forward_of(model_or_graph: nn.Module, example_inputs: Any) -> Forward:
    """One call of a model as a flat graph."""
    if not isinstance(model_or_graph, nn.Module):
        raise StageError(f"a value of type {type(model_or_graph).__name__} cannot be split, expected a torch.nn.Module")
    args, kwargs = called_with(example_inputs)
    if isinstance(model_or_graph, fx.GraphModule):
        return take_graph(model_or_graph, args, kwargs)
    return trace_forward(model_or_graph, args, kwargs)


def work_of(forward: Forward) -> list[int]:
    """Places of the nodes that call something."""
    nodes = forward.graph_module.graph.nodes
    return [node.meta[PLACE] for node in nodes if node.op not in ("placeholder", "get_attr", "output")]


def _described(node: fx.Node, stage: int, forward: Forward) -> Crossing:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise StageError(
            f"{node.name}, a value of type {type(value).__name__}, is made in stage {stage} and read later, but only tensors "
            "can cross; put the cut elsewhere"
        )
    path = forward.batch.get(node)
    name, module = (node.name, module_of(node)) if path is None else (path, "")
    return Crossing.of(name, module, stage, value)


def _modules(forward: Forward, places: Sequence[int], index: int) -> tuple[str, ...]:
    """FQNs of modules whose calls are all in the stage ``index``, in order of first calls; a module before those inside it."""

    def stages(call: Call) -> set[int]:
        # The last node of a call stands before call[1], hence bisect_left. A call without nodes at a cut is before the cut.
        ends = bisect_left(places, call[1])
        return {min(bisect_right(places, call[0]), ends), ends}

    inside = [fqn for fqn, calls in forward.calls.items() if fqn and all(stages(call) == {index} for call in calls)]
    return tuple(sorted(inside, key=lambda fqn: (forward.calls[fqn][0][0], fqn.count("."))))


def _part(
    forward: Forward, held: Sequence[str], receives: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """A graph of ``nodes`` that takes the ``held`` parameters and buffers, then what is received, and gives ``outputs``."""
    graph, constants = fx.Graph(), dict[str, Any]()
    inputs = {fqn: graph.placeholder(f"held_{number}") for number, fqn in enumerate(held)}
    copies = {node: inputs[fqn] for node, fqn in forward.parameter_nodes.items() if fqn in inputs}
    for node in receives:
        copies[node] = graph.placeholder(node.name)
    for node in copies:
        copies[node].meta = dict(node.meta)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # an attribute of the graph: nodes of every other kind were copied before
            copies[node] = graph.node_copy(node)
            constants[str(node.target)] = held_by(forward.graph_module, str(node.target))
        return copies[node]

    for node in nodes:
        copies[node] = _copied(graph, node, copy_of)
    graph.output([copy_of(node) for node in outputs])
    graph.lint()
    return fx.GraphModule(constants, graph, "Stage")


def _copied(graph: fx.Graph, node: fx.Node, copy_of: Any) -> fx.Node:
    """A copy of ``node``; if it was traced where gradients were off, the copy calls its operator with gradients off."""
    if not node.meta.get(WITHOUT_GRAD) or node.op != "call_function":
        return graph.node_copy(node, copy_of)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy_of)
    target: Any = node.target
    made = graph.create_node("call_function", without_grad, (target, *args), kwargs, node.name)
    made.meta = dict(node.meta)
    return made


def without_grad(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with gradients off, as it was called when it was traced."""
    with torch.no_grad():
        return function(*args, **kwargs)
