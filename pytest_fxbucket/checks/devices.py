"""A graph that was traced on the CPU, put on another device: whether it can run there, and its constants moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat import fake_tensors
from pytest_fxbucket.graph.ops import overload

_CPU = torch.device("cpu")


def cannot_run_on(device_type: str, graph_module: fx.GraphModule) -> str:
    """A clause that names the first node whose operator has no kernel for ``device_type`` ("cuda"); "" if all have one."""
    for node in _nodes(graph_module):
        op = overload(node)
        if op is not None and not fake_tensors.has_kernel(op, device_type):
            return f"the graph, which is traced on the CPU, calls {op} ({node.name}), which {device_type} does not have"
    return ""


def place(graph_module: fx.GraphModule, device: str) -> None:
    """Let ``graph_module`` make and keep its tensors on ``device``: changes, in place, device arguments and constants.

    Arguments that say another device than the CPU stay, as do constants there.
    """
    target = torch.device(device)
    if target == _CPU:
        return
    for module in _graph_modules(graph_module):
        for node in module.graph.nodes:
            node.args, node.kwargs = _moved(node.args, target), _moved(node.kwargs, target)
        for name in {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}:
            path, _, last = name.rpartition(".")
            holder = module.get_submodule(path)
            value = getattr(holder, last)
            if isinstance(value, torch.Tensor) and value.device == _CPU:
                delattr(holder, last)  # a buffer and a plain attribute alike
                setattr(holder, last, value.detach().to(target))
        module.recompile()


def _nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    for module in _graph_modules(graph_module):
        yield from module.graph.nodes


def _graph_modules(graph_module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph, and those that it hands to operators of higher order."""
    return (module for module in graph_module.modules() if isinstance(module, fx.GraphModule))


def _moved(value: Any, target: torch.device) -> Any:
    if isinstance(value, torch.device):
        return target if value.type == "cpu" else value
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, target) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, target) for key, item in value.items()}
    return value
