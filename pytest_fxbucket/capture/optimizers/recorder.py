"""Records what a function does to fake tensors as a graph, numbers that it takes from tensors (``item()``) included.

make_fx knows constants' values and would bake them in (an optimizer's step counter begins as a constant). Here each tensor is
an input or computed, and a number that is taken from one stays live. In-place operators are recorded as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from pytest_fxbucket.capture.functional_operators import given_back, with_some_numbers
from pytest_fxbucket.capture.refusals import refuse_in_place
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode, TorchDispatchMode, value_of
from pytest_fxbucket.compat.live_numbers import LiveNumber, node_of
from pytest_fxbucket.errors import CaptureError

_ATEN = torch.ops.aten


class Recorder(TorchDispatchMode):
    """While recording, every operator becomes a node of ``graph``; it does not ask for gradients."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._mode = fake_mode
        self._nodes: dict[int, tuple[fx.Node, torch.Tensor]] = {}
        """By a tensor's identity its node, and the tensor, which is kept alive so that no other gets that identity."""

    def input(self, name: str, fake: torch.Tensor) -> None:
        """Make ``fake`` the next input of the graph."""
        self._remember(fake, self.graph.placeholder(re.sub(r"\W", "_", name)))

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node that is ``tensor``. Raises :class:`CaptureError` for a tensor from elsewhere."""
        found = self._nodes.get(id(tensor))
        if found is None:
            raise CaptureError(
                f"it uses a tensor of shape {tuple(tensor.shape)} that is neither parameter, gradient, state nor learning rate"
            )
        return found[0]

    def number(self, tensor: torch.Tensor) -> LiveNumber:
        """The value of a floating tensor of one element, as a number that the graph computes."""
        if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
            raise CaptureError(f"it takes the value of a tensor of {tensor.numel()} elements and dtype {tensor.dtype}")
        return LiveNumber(self.graph.call_function(_ATEN._local_scalar_dense.default, (self.node(tensor),)))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the block."""
        with self._mode, _Items(self), self, torch.no_grad():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Optimizers mark their steps for the profiler, which is no part of the update.
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        refuse_in_place(func)
        if func is _ATEN.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._constant(args[0])
        if func is _ATEN._local_scalar_dense.default:
            if torch.is_anomaly_enabled():
                raise CaptureError(
                    "set_detect_anomaly looks at the values of gradients, which are known only when it runs; leave it out"
                )
            raise CaptureError(
                "it decides by the value of a tensor, which is known only when the step runs; torch.where decides within the "
                "graph, and what is no part of the step (an average of weights) may be called behind it"
            )
        # An operator that only writes gives its arguments back: nothing needs to be computed, and they keep the node that they
        # have, since :func:`make_functional` finds the new values later.
        result = given_back(func, args, kwargs)
        if result is None:
            with self._mode:
                result = func(*with_some_numbers(args), **with_some_numbers(kwargs))
        node = self.graph.call_function(func, self._plain(args), self._plain(kwargs))
        if not func._schema.returns:
            return None
        node.meta["val"] = result
        if isinstance(result, torch.Tensor) and id(result) not in self._nodes:
            self._remember(result, node)
        for place, part in enumerate(result if isinstance(result, (list, tuple)) else ()):
            if isinstance(part, torch.Tensor) and id(part) not in self._nodes:
                self._remember(part, self.graph.call_function(getitem, (node, place)))
        return result

    def _remember(self, fake: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = fake
        self._nodes[id(fake)] = node, fake

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        """The fake tensor of a Python number that was made a tensor; a node makes it when the graph runs."""
        if value.dim():
            raise CaptureError(f"it makes a tensor of shape {tuple(value.shape)} from Python numbers")
        with self._mode:
            fake = torch.empty((), dtype=value.dtype, device=value.device)
        self._remember(fake, self.graph.call_function(_ATEN.scalar_tensor.default, (value_of(value),), {"dtype": value.dtype}))
        return fake

    def _plain(self, value: Any) -> Any:
        """Arguments with nodes for tensors and live numbers."""

        def plain(leaf: Any) -> Any:
            return (
                self.node(leaf)
                if isinstance(leaf, torch.Tensor)
                else node_of(leaf)
                if isinstance(leaf, torch.SymFloat)
                else leaf
            )

        return pytree.tree_map(plain, value)


class _Items(TorchFunctionMode):
    """Takes ``item()`` where Python calls it: a number that goes through C++ loses its type."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item:
            return self._recorder.number(args[0])
        return func(*args, **(kwargs or {}))
