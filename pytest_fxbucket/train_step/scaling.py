"""A gradient scaler in a captured step: its scale is state of the graph, and a step that it would skip is undone there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

TENSORS = {"_scale": "scaler.scale", "_growth_tracker": "scaler.growth_tracker"}
"""Attributes of a scaler that are tensors, and their names as state of a graph."""
OF_OPTIMIZERS = ("grad_scale", "found_inf")
"""Attributes that a scaler sets on an optimizer whose kernels unscale and skip by themselves (fused)."""


def tensors_of(scaler: GradScaler | None) -> dict[str, torch.Tensor]:
    """The scaler's tensors by name. They are made here if the scaler was never used."""
    if scaler is None or not scaler.is_enabled():
        return {}
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    return {fqn: getattr(scaler, name) for name, fqn in TENSORS.items()}


def settings_of(scaler: GradScaler | None) -> Hashable:
    """The numbers of the scaler that a graph has as constants."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


@contextmanager
def traced_scaler(scaler: GradScaler | None, twins: Mapping[int, torch.Tensor], step: Callable[..., Any]) -> Iterator[None]:
    """While inside, ``scaler`` has the ``twins`` of its tensors, by identity of the real ones, and asks for no values.

    ``step(optimizer, skipped)`` takes a step; ``skipped`` is a tensor that is not 0 if the step is to have no effect.
    """
    if scaler is None or not scaler.is_enabled():
        yield
        return

    # In place of ``GradScaler._maybe_opt_step``, which asks by item() whether any gradient is infinite.
    def maybe(optimizer: Optimizer, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        found: list[torch.Tensor] = list(state["found_inf_per_device"].values())
        step(optimizer, torch.stack([one.to(found[0].device) for one in found]).sum())

    held = {name: getattr(scaler, name) for name in TENSORS}
    # While traced, the scaler notes stages and fake tensors in these.
    states = scaler._per_optimizer_states.copy()
    try:
        for name, tensor in held.items():
            setattr(scaler, name, twins[id(tensor)])
        with patch.object(scaler, "_maybe_opt_step", maybe):
            yield
    finally:
        for name, tensor in held.items():
            setattr(scaler, name, tensor)
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(states)
