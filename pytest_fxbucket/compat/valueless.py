"""Parameters without memory in code that builds a model: ``Module._apply`` and dispatch modes, in torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode

if TYPE_CHECKING:
    import torch

Change = Callable[["nn.Module", str, "torch.Tensor"], "torch.Tensor"]


@contextmanager
def on_registration(change: Change) -> Iterator[None]:
    """While inside, ``change(module, name, parameter)`` says what a module gets where a parameter is put in its place.

    Heard are registration and ``Module._apply``, which gives meta parameters memory (``to_empty``).
    """

    def registered(module: nn.Module, name: str, parameter: Any) -> Any:
        return None if parameter is None else change(module, name, parameter)

    def applied(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = apply(module, *args, **kwargs)
        held: dict[str, Any] = module._parameters
        held.update({name: change(module, name, parameter) for name, parameter in held.items() if parameter is not None})
        return given

    apply: Any = nn.Module._apply
    handle = register_module_parameter_registration_hook(registered)
    nn.Module._apply = applied  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]
        handle.remove()


@contextmanager
def computing_without_values() -> Iterator[FakeTensorMode]:
    """While inside, operators on fake tensors of the mode that is given, and on real ones beside them, give fake ones.

    What initialises a fake tensor is told that there is nothing more to do where it asks for a value; other code that asks gets
    torch's exception. ``Module.to`` and the like work on modules of such parameters.
    """
    import torch

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    swap = torch.utils.swap_tensors

    def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        if isinstance(one, FakeTensor):  # weak references to it, which torch's cache holds, forbid a true swap
            one.data = other.data
        else:
            swap(one, other)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swapped
    try:
        with _Valueless(mode):
            yield mode
    finally:
        torch.utils.swap_tensors = swap


class _Valueless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        import torch

        if func is torch.ops.aten._local_scalar_dense.default and _in_initialiser():
            return False if args[0].dtype is torch.bool else 0
        with self._mode:
            return func(*args, **(kwargs or {}))


def _in_initialiser() -> bool:
    """Whether a function whose name ends with one underscore asks, torch's sign of writing in place: ``trunc_normal_``."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if name.endswith("_") and not name.endswith("__"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
