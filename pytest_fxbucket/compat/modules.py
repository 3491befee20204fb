"""Modules' private tables, what torch does to every module, and modules that ``torch.compile`` wraps; in torch 2.11 to 2.15.

``autograd.Function.apply`` is not among the calls that a ``TorchFunctionMode`` sees.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.utils import _apply_to_tensors
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

__all__ = ["TorchFunctionMode", "functions_given", "with_parameters"]

_OF_RNNS = ("_flat_weights", "_flat_weight_refs")


@contextmanager
def with_parameters(model: nn.Module, places: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """In the block each module of ``model`` has, in place of its parameters, what ``places`` makes of them.

    An RNN keeps lists of its parameters too, and makes them anew when it finds other parameters; they are put back as well.
    """
    before = [(module, module._parameters) for module in model.modules()]
    kept = [(module, {name: vars(module)[name] for name in _OF_RNNS if name in vars(module)}) for module, _ in before]
    try:
        for module, parameters in before:
            module._parameters = places(parameters)
        yield
    finally:
        for module, parameters in before:
            module._parameters = parameters
        for module, lists in kept:
            vars(module).update(lists)


@contextmanager
def functions_given(exchange: Callable[[Any], Any]) -> Iterator[None]:
    """In the block every ``autograd.Function`` of the process is applied to what ``exchange`` makes of its arguments."""
    before = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return before.__get__(None, cls)(*exchange(args), **exchange(kwargs))

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]  # replaced for a while
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]  # replaced for a while


_KEPT_ON: list[TorchFunctionMode] = []
"""Modes of the blocks of :func:`on_in_backward` that run now, of all threads."""
_CHECKPOINTS = ExitStack()
"""Has torch's checkpoints wrapped as long as there is such a block."""


@contextmanager
def on_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """In the block ``mode`` is on, and also where checkpoints compute again: torch takes it off as long as backward runs.

    Several threads may be in such blocks, and leave them in any order: ranks of one process are threads that take turns. A
    checkpoint computes again under the modes that were on, in its own thread, when it was called.
    """
    if not _KEPT_ON:
        _CHECKPOINTS.enter_context(_checkpoints_wrapped())
    _KEPT_ON.append(mode)
    try:
        with mode:
            yield
    finally:
        _KEPT_ON.remove(mode)
        if not _KEPT_ON:
            _CHECKPOINTS.close()


def _checkpoints_wrapped() -> AbstractContextManager[Any]:
    frame, reentrant = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction

    def under_modes(function: Callable[..., Any]) -> Callable[..., Any]:
        modes = [mode for mode in _get_current_function_mode_stack() if mode in _KEPT_ON]

        def again(*args: Any, **kwargs: Any) -> Any:
            already = _get_current_function_mode_stack()
            with ExitStack() as inside:
                for mode in modes:
                    if mode not in already:
                        inside.enter_context(mode)
                return function(*args, **kwargs)

        return again

    changed: dict[str, Any] = {
        "_CheckpointFrame": lambda function, *more, **named: frame(under_modes(function), *more, **named),
        "CheckpointFunction": SimpleNamespace(apply=lambda function, *more: reentrant.apply(under_modes(function), *more)),
    }
    wrapped: AbstractContextManager[Any] = patch.multiple(checkpoint, **changed)
    return wrapped


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], given: Any) -> Any:
    """``given`` with each tensor in its tuples, lists, dicts, sets and dataclasses changed."""
    return _apply_to_tensors(change, given)


# Private tables of torch that change every module and every new tensor: global hooks, the default device (torch 2.11 to 2.15).


_TABLES = (
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
_FLAG = "_global_is_full_backward_hook"


def tensors_within(given: Any) -> list[torch.Tensor]:
    """All tensors that :func:`each_tensor` finds."""
    found: list[torch.Tensor] = []

    def find(one: torch.Tensor) -> torch.Tensor:
        found.append(one)
        return one

    each_tensor(find, given)
    return found


def is_replicated(module: nn.Module) -> bool:
    """Whether it is under ``replicate()`` of ``torch.distributed._composable``, which is DDP in the module's own class."""
    there = sys.modules.get("torch.distributed._composable.replicate")
    return isinstance(module, getattr(there, "DDP", ()))


def module_hooks() -> dict[str, Any]:
    """All global hooks of modules, by table."""
    found: dict[str, Any] = {name: dict(getattr(module, name)) for name in _TABLES if hasattr(module, name)}
    return {**found, _FLAG: getattr(module, _FLAG, None)}


def set_module_hooks(hooks: dict[str, Any]) -> None:
    """Put ``hooks``, as :func:`module_hooks` gave them, in place of all global hooks of modules."""
    for name, entries in hooks.items():
        if name == _FLAG:
            setattr(module, name, entries)
            continue
        table = getattr(module, name)
        table.clear()
        table.update(entries)


def default_device() -> torch.device | None:
    """The device that torch.set_default_device has set in this thread; None where it was not called."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context.device if context is not None else None


# Modules and functions that torch.compile wraps, run as they are (``torch._dynamo.config``); in torch 2.11 to 2.15.


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what torch.compile gave, or compiles itself when it is called."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def uncompiled() -> Iterator[None]:
    """In the block modules and functions that torch.compile wraps run as if they were not wrapped, under a tracer too."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), torch.compiler.set_stance("force_eager"):
        yield


# A module's own hooks (tables that ``torch.nn.Module.__call__`` reads, in torch 2.11 to 2.15).

_BACKWARD_TABLES = ("_backward_hooks", "_backward_pre_hooks")
_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    *_BACKWARD_TABLES,
)


@contextmanager
def hooks_off(module: nn.Module, *, backward_alone: bool = False) -> Iterator[None]:
    """In the block ``module`` has none of its own hooks, or none around backward; its children have theirs."""
    kept = {name: getattr(module, name) for name in (_BACKWARD_TABLES if backward_alone else _HOOK_TABLES)}
    for name in kept:
        setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for name, table in kept.items():
            setattr(module, name, table)


def has_partial_backward_hooks(module: nn.Module) -> bool:
    """Say whether it has hooks of ``register_backward_hook``, which do not see the gradients of its inputs."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)


def forward_pre_hooks(module: nn.Module) -> list[tuple[Any, bool]]:
    """Its hooks before forward, in order, and whether each takes keyword arguments."""
    return [(hook, number in module._forward_pre_hooks_with_kwargs) for number, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: nn.Module) -> list[tuple[Any, bool]]:
    """Its hooks behind forward, in order, and whether each takes keyword arguments."""
    return [(hook, number in module._forward_hooks_with_kwargs) for number, hook in module._forward_hooks.items()]


def backward_hooks(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """Its hooks behind backward, and those before it."""
    return list(module._backward_hooks.values()), list(module._backward_pre_hooks.values())


# What DDP, ``torch.compile`` and activation checkpointing put into the names of what they wrap; in torch 2.11 to 2.15.


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_fqn(fqn: str, model: nn.Module) -> str:
    """``fqn``, a name in ``model``, without what wrappers put into names."""
    plain: list[str] = []
    module: nn.Module | None = model
    for name in fqn.split("."):
        # Anybody may call a module "module"; of classes that wrap a model so there are several, torch's and others'.
        if name not in _WRAPPERS and not (name == "module" and "DataParallel" in type(module).__name__):
            plain.append(name)
        module = module._modules.get(name) if module is not None else None
    return ".".join(plain)
