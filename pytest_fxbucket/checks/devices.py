"""Putting a graph that was traced on the CPU on another device: whether it can run there, and moving its constants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.checks import attention_on_gpus
from pytest_fxbucket.compat import fake_tensors
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.step.roles import Key, Value

Graph = tuple[fx.GraphModule, Sequence[Value]]
"""A graph of a step with its inputs."""
_CPU = torch.device("cpu")
_NUMBER = torch.ops.aten._local_scalar_dense.default


def cannot_run_on(device_type: str, graph_module: fx.GraphModule, *, with_ours: bool = True) -> str:
    """A clause that names the first node whose operator has no kernel for ``device_type`` ("cuda"); "" if all have one.

    ``with_ours``: our own CUDA kernels (:mod:`~pytest_fxbucket.checks.attention_on_gpus`) count, too.
    """
    ours = attention_on_gpus.OPERATORS if with_ours else ()
    for node in _nodes(graph_module):
        op = overload(node)
        if op is not None and op not in ours and not fake_tensors.has_kernel(op, device_type):
            return f"the graph, which is traced on the CPU, calls {op} ({node.name}), which {device_type} does not have"
    return ""


def attends_otherwise(graph_module: fx.GraphModule) -> bool:
    """Whether the graph's attention runs by our kernel on a GPU, where the model itself would call another one."""
    return any(overload(node) in attention_on_gpus.OPERATORS for node in _nodes(graph_module))


def place(graphs: Sequence[Graph], device: str) -> frozenset[Key]:
    """Let the graphs of a step make and keep their tensors on ``device``: changes device arguments and constants in place.

    Only the CPU is replaced: device arguments and constants of other devices stay. Gives the keys of inputs that stay on the
    CPU, where optimizers have them too: learning rates, and counters of which graphs read only the number.
    """
    target = torch.device(device)
    if target == _CPU:
        return frozenset()
    numbers, on_cpu = _numbers_of(graphs)
    for (graph_module, _), nodes in zip(graphs, on_cpu, strict=True):
        if attends_otherwise(graph_module):
            attention_on_gpus.register()
        for module in _graph_modules(graph_module):
            _move(module, target, nodes)
    return numbers


def _move(module: fx.GraphModule, target: torch.device, on_cpu: Collection[fx.Node]) -> None:
    for node in module.graph.nodes:
        if node not in on_cpu:
            node.args, node.kwargs = _moved(node.args, target), _moved(node.kwargs, target)
    for name in {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}:
        path, _, last = name.rpartition(".")
        holder = module.get_submodule(path)
        value = getattr(holder, last)
        if isinstance(value, torch.Tensor) and value.device == _CPU:
            delattr(holder, last)  # a constant may be a registered buffer or a plain attribute: this removes either
            setattr(holder, last, value.detach().to(target))
    module.recompile()


def _numbers_of(graphs: Sequence[Graph]) -> tuple[frozenset[Key], list[set[fx.Node]]]:
    """Keys of learning rates, and of state that is on the CPU in every graph that has it; and each graph's nodes there."""
    # A fixed point: a counter that one graph needs on the device is on the device in all, and what is computed together with it
    # then is, too. Learning rates stay whatever graphs do with them.
    scalars = [_scalars(graph_module, inputs) for graph_module, inputs in graphs]
    keys = {value.key for of_graph in scalars for _, value in of_graph}
    rates = {value.key for of_graph in scalars for _, value in of_graph if value.role == "hyper"}
    while True:
        given = [[(node, value) for node, value in of_graph if value.key in keys] for of_graph in scalars]
        found = [_on_cpu([node for node, _ in of_graph]) for of_graph in given]
        elsewhere = {v.key for of_graph, nodes in zip(given, found, strict=True) for node, v in of_graph if node not in nodes}
        if elsewhere <= rates:
            return frozenset(keys), found
        keys -= elsewhere - rates


def _scalars(graph_module: fx.GraphModule, inputs: Sequence[Value]) -> list[tuple[fx.Node, Value]]:
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    given = zip(placeholders, inputs, strict=True)
    return [(node, value) for node, value in given if value.role in ("state", "hyper") and value.shape == ()]


def _on_cpu(given: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes of ``given`` that are only read as Python numbers or returned, with the nodes computed from them on the way."""
    # First everything that is computed from ``given`` alone. Then, again and again, nodes are taken out that something else
    # reads, or that need a node which is gone. Last come tensors made of Python numbers that only the nodes left read.
    found = set(given)
    pending = list(given)
    while pending:
        for user in pending.pop().users:
            if user.op == "call_function" and user.target is not _NUMBER and user not in found and _needs(user) <= found:
                found.add(user)
                pending.append(user)
    while wrong := {node for node in found if not _needs(node) <= found or not _is_read_within(node, found)}:
        found -= wrong
    makers = {maker for node in found for maker in node.all_input_nodes if maker.op == "call_function"}
    return found | {maker for maker in makers if found.issuperset(maker.users)}


def _needs(node: fx.Node) -> set[fx.Node]:
    """The inputs of ``node``, without tensors that are made of Python numbers: those are made where they are needed."""
    return {source for source in node.all_input_nodes if source.all_input_nodes or source.op in ("placeholder", "get_attr")}


def _is_read_within(node: fx.Node, found: Collection[fx.Node]) -> bool:
    return all(user in found or user.target is _NUMBER or user.op == "output" for user in node.users)


def _nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    for module in _graph_modules(graph_module):
        yield from module.graph.nodes


def _graph_modules(graph_module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph, and the graphs inside it that it hands to higher-order operators."""
    return (module for module in graph_module.modules() if isinstance(module, fx.GraphModule))


def _moved(value: Any, target: torch.device) -> Any:
    if isinstance(value, torch.device):
        return target if value.type == "cpu" else value
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, target) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, target) for key, item in value.items()}
    return value
