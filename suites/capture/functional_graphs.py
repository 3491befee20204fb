"""Functions that write in place, traced as they are, for tests of functional twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture.functionalize import make_functional
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.tracing import trace
from pytest_fxbucket.graph.effects import written


def traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """``function(*inputs)`` as ATen calls that write in place."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in inputs]
    with mode, torch.no_grad():
        return trace(function, fakes)


def functional(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The functional form: what it returned before, then the last value of every input, in their order."""
    graph = graph_module.graph
    values = make_functional(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    output.args = ([*returned, *(values.get(node, node) for node in inputs)],)
    graph.eliminate_dead_code()
    graph.lint()
    assert not [node for node in graph.nodes if written(node)]
    graph_module.recompile()
    return graph_module


def both(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Results and final inputs of ``function`` as it is, and of its functional graph, which must leave its inputs alone."""
    eager = clones(inputs)
    with torch.no_grad():
        result = function(*eager)
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    given = clones(inputs)
    graph_results = list(functional(traced(function, inputs))(*given))
    assert same(given, inputs), "the functional graph wrote its inputs"
    return [*results, *eager], graph_results


def clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Bit for bit, dtypes and shapes too."""
    return len(one) == len(other) and all(
        a is b is None or (a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b))
        for a, b in zip(one, other, strict=True)
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
