"""Tracing with make_fx (``torch.fx.experimental.proxy_tensor``): its errors, and checkpoints amid it; in torch 2.11 to 2.15."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from pytest_fxbucket.errors import text_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode


def trace(
    function: Callable[..., Any], inputs: Sequence[Any], decompositions: Mapping[Any, Callable[..., Any]] | None = None
) -> fx.GraphModule:
    """Trace ``function(*inputs)``, forward and backward alike, into one graph of ATen calls.

    ``inputs`` are fake tensors, or symbolic sizes; tensors that require grad stay leaves. Node ``meta["val"]`` holds fake
    results. Operators in ``decompositions`` are traced as what they are made of. The module is compiled when first called.
    """
    import torch
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    from pytest_fxbucket.compat.fake_tensors import of_any_dtype

    quietly = quiet("torch._subclasses.fake_tensor")
    with (
        torch.autograd.set_multithreading_enabled(False),
        quietly,
        quiet_structured_log(),
        of_any_dtype(),
        without_onednn(),
        _use_lazy_graph_module(True),
    ):
        # The inputs are fake tensors already: mode ``real`` takes them as they are.
        return make_fx(function, dict(decompositions or {}), tracing_mode="real")(*inputs)


_WITHOUT_VALUES = "; keep it a tensor (torch.where instead of if), or leave it out of the step"
_NO_VALUE = (
    "it asks for the value of a tensor (item(), bool(), tolist(), numpy()), which does not exist while tracing"
    f"{_WITHOUT_VALUES}"
)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Nothing from the logger ``name`` in the block."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def without_onednn() -> Iterator[None]:
    """In the block recurrent layers run, and are traced, without oneDNN, whose workspace a traced backward lacks.

    ``torch.backends.mkldnn.flags`` is not used: it sets other settings too, and warns of them.
    """
    import torch

    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def quiet_structured_log() -> AbstractContextManager[None]:
    """Silence torch's structured log unless ``TORCH_TRACE`` asks for it; pytest listens to loggers that do not propagate."""
    return nullcontext() if os.environ.get("TORCH_TRACE") else quiet("torch.__trace")


def is_wrapped_by_functorch(tensor: object) -> bool:
    """Whether it is a tensor within a transformation of ``torch.func``, which has no storage of its own."""
    import torch

    return isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_fake(value: object) -> bool:
    """Whether ``value`` is a tensor without data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def looks_at_values(error: BaseException) -> bool:
    """Whether ``error`` was raised because code asked for values, which fake tensors do not have."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    asked = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    return asked or ".numpy() is not supported" in text_of(error)


def untraceable(error: BaseException, unknown: str = "register it with register_buffer") -> str | None:
    """Why tracing raises ``error`` where running would not, as a sentence; None for an error of the user's own.

    ``unknown`` is what to do with a tensor that is no input.
    """
    import torch
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    if isinstance(error, DynamicOutputShapeException):
        return f"the shape that {error.func} gives depends on values, which do not exist while tracing{_WITHOUT_VALUES}"
    if looks_at_values(error):
        return _NO_VALUE
    if "convert all Tensors to FakeTensors" in text_of(error):
        return f"it uses a tensor that is neither parameter, buffer nor input of the step; {unknown}"
    if isinstance(error, KeyError) and isinstance(next(iter(error.args), None), torch.Tensor):
        return "it looks something up by a tensor, and while tracing another stands in each tensor's place; look it up by name"
    return None


_NO_KERNEL = re.compile(r'("\w+") not implemented for \'(?:torch\.)?(\w+)\'')
_TWO_DTYPES = re.compile(
    r"expected scalar type|the same dtype|same data type|to match query dtype|Input type \(.*\) and (?:weight|bias) type"
)


def refused_eagerly(error: BaseException) -> str | None:
    """A sentence if ``error`` says that torch has no kernel for a dtype, or for two together; None for any other error.

    Real tensors raise it as fake ones do.
    """
    if not isinstance(error, NotImplementedError | RuntimeError):
        return None
    said = text_of(error)
    if found := _NO_KERNEL.search(said):
        return f"torch has no {found[1]} for {found[2]}, eagerly neither; cast what it is given, as with x.float()"
    if _TWO_DTYPES.search(said):
        return f"{said.rstrip('.')}, which torch refuses eagerly, too; cast one to the other's, as with x.to(weight.dtype)"
    return None


def is_tracing() -> bool:
    """Whether what is called now is traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


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

    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # torch declares it nowhere


def current_autograd_node() -> Any:
    """The autograd node that backward runs just now in this thread; None outside of backward."""
    import torch

    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether this thread runs within ``backward()``."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(do: Callable[[], None]) -> None:
    """Call ``do()`` when the ``backward()`` that runs now has made all gradients; ``backward()`` raises what ``do`` raises."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(do)


def nodes_behind(grad_fn: Any, known: Container[int] = ()) -> Iterator[Any]:
    """The autograd node ``grad_fn`` and those that backward goes on to, but for those of ``known`` numbers and behind them."""
    queue, met = [grad_fn], set[int]()
    for node in queue:
        number = autograd_number(node)
        if number not in met and number not in known:
            met.add(number)
            yield node
            queue += [one for one, _ in node.next_functions if one is not None]


def autograd_number(grad_fn: Any) -> int:
    """Sequence number of an autograd node; grows with creation within a thread."""
    return int(grad_fn._sequence_nr())


# Work on fake tensors amid a trace, unseen by it: ``torch.utils._python_dispatch``, in torch 2.11 to 2.15.


@contextmanager
def untraced(fake_mode: FakeTensorMode) -> Iterator[None]:
    """In the block only ``fake_mode`` is on, and hooks on saved tensors, such as those of checkpoints, see none."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        fake_mode,
    ):
        yield


# Selective checkpoints while a step is traced (``torch.utils.checkpoint._VersionWrapper``, in torch 2.11 to 2.15).


@contextmanager
def caches_unversioned() -> Iterator[None]:
    """In the block a selective checkpoint does not compare versions of the tensors that it keeps: tracing raises versions.

    Afterwards fx's ``traceback.current_meta`` is as before: what checkpoints leave there would get onto nodes of later graphs.
    """
    from torch.fx import traceback
    from torch.utils import checkpoint

    before = dict(traceback.current_meta)
    try:
        with patch.object(checkpoint._VersionWrapper, "get_val", lambda kept, _: kept.val):
            yield
    finally:
        traceback.current_meta.clear()
        traceback.current_meta.update(before)
