"""Fake tensors in the places of a module's parameters and buffers, for as long as a step is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode


def fake_twin(mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor:
    """A tensor without data like ``real``: a parameter for a parameter, with its attributes and hooks,
    and ``stands_for``, the real one. On meta: on the CPU."""
    device = torch.device("cpu") if real.is_meta else real.device
    with mode, torch.no_grad():
        fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=device)
    if not isinstance(real, torch.nn.Parameter):
        return fake.requires_grad_(real.requires_grad)
    twin = torch.nn.Parameter(fake, requires_grad=real.requires_grad)
    twin.stands_for = real  # type: ignore[attr-defined]
    for name, value in vars(real).items():
        if not hasattr(twin, name):
            setattr(twin, name, value)
    for hook in (real._backward_hooks or {}).values():
        twin.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(real, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return twin


def fake_twins(model: nn.Module, mode: FakeTensorMode) -> dict[int, torch.Tensor]:
    """Twins of all parameters and buffers of ``model``, by identity of the real tensor."""
    tensors = [*model.parameters(), *model.buffers()]
    return {id(tensor): fake_twin(mode, tensor) for tensor in tensors}


@contextmanager
def in_modules(model: nn.Module, twins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """While inside, modules have the ``twins`` (by identity of the real tensor) in their places.

    Then every module has the attributes, parameters and buffers that it had before, whatever was set inside.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    places: list[dict[str, Any]] = [held for module, _ in before for held in (module._parameters, module._buffers)]
    reals = [dict(held) for held in places]
    try:
        for held in places:
            held.update({name: twins[id(tensor)] for name, tensor in held.items() if tensor is not None})
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for held, real in zip(places, reals, strict=True):
            held.clear()
            held.update(real)
