"""Tracing with make_fx (``torch.fx.experimental.proxy_tensor``) and the autograd names it needs, in torch 2.11 to 2.14."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import fx


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Trace ``function(*inputs)``, forward and backward alike, into one graph of ATen calls.

    ``inputs`` are fake tensors; those that require grad stay leaves. Node ``meta["val"]`` holds fake results.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.autograd.set_multithreading_enabled(False):
        return make_fx(function, tracing_mode="real")(*inputs)


def current_graph() -> fx.Graph:
    """The graph that is being traced just now."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None, "asked for the current graph outside trace()"
    graph: fx.Graph = mode.tracer.graph
    return graph


def next_autograd_number() -> int:
    """Sequence number that the next autograd node of this thread will get."""
    import torch

    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def autograd_number(grad_fn: Any) -> int:
    """Sequence number of an autograd node; grows with creation within a thread."""
    return int(grad_fn._sequence_nr())
