"""A model and its stages side by side: outputs, gradients and buffers as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pytest_fxbucket.pipeline import Stages
from pytest_fxbucket.pipeline.stages import Crossing
from pytest_fxbucket.pipeline.values import called_with

STEPS = 2


def bits(value: Any) -> Any:
    """``value`` with the bytes of each tensor, its shape and dtype in its place."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if is_dataclass(value) and not isinstance(value, dict):
        return type(value), {field.name: bits(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return type(value), {key: bits(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [bits(item) for item in value]
    return value


def summed(output: Any) -> Tensor:
    """One number of every tensor with a gradient in ``output``, each with a weight of its own."""
    plain = vars(output) if is_dataclass(output) and not isinstance(output, dict) else output
    leaves = [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((leaf * torch.arange(1, leaf.numel() + 1).view(leaf.shape)).sum() for leaf in leaves)  # type: ignore[return-value]


def steps(model: nn.Module, batch: Any, step: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> dict[str, Any]:
    """Bits of some steps: outputs, gradients, then buffers of ``model``, and where the generator is."""
    args, kwargs = called_with(batch)
    torch.manual_seed(3)
    found: dict[str, Any] = {}
    for number in range(STEPS):
        model.zero_grad()
        found[f"output {number}"] = bits(step(args, kwargs))
        found |= {f"gradient {number} {fqn}": bits(parameter.grad) for fqn, parameter in model.named_parameters()}
    found |= {f"buffer {fqn}": bits(buffer) for fqn, buffer in model.named_buffers()}
    return {**found, "generator": bits(torch.get_rng_state())}


def eagerly(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Of the model itself, on a copy."""
    model = deepcopy(model)
    return steps(model, batch, lambda args, kwargs: _trained(model, args, kwargs))


def in_turn(stages: Stages, model: nn.Module, batch: Any) -> dict[str, Any]:
    """Of all stages one after the other, under one autograd graph."""
    return steps(model, batch, lambda args, kwargs: _trained(stages, args, kwargs))


def _trained(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output = call(*args, **kwargs)
    summed(output).backward()
    return output


def apart(stages: Stages, model: nn.Module, batch: Any) -> dict[str, Any]:
    """Of stages that get copies of what they receive, as from another process, and send gradients back."""
    return steps(model, batch, lambda args, kwargs: step_apart(stages, stages.batch(*args, **kwargs)))


def assert_bits(stages: Stages, model: nn.Module, batch: Any, eager: dict[str, Any]) -> None:
    """``stages``, in one process and apart, leave the bits that ``model`` left, ``eager``; its buffers begin as they did."""
    start = {fqn: buffer.clone() for fqn, buffer in model.named_buffers()}
    assert in_turn(stages, model, batch) == eager
    for fqn, buffer in model.named_buffers():
        buffer.copy_(start[fqn])
    assert apart(stages, model, batch) == eager


def sent(value: Tensor, crossing: Crossing) -> Tensor:
    """A copy of ``value`` in memory of its own, made by what is said of it alone."""
    assert (value.shape, value.dtype) == (crossing.shape, crossing.dtype)
    made = torch.empty_strided(crossing.shape, crossing.strides, dtype=crossing.dtype)
    once = tuple(slice(None) if stride else slice(1) for stride in crossing.strides)  # not all of what is expanded
    made[once].copy_(value.detach()[once])
    return made.requires_grad_(value.requires_grad)


def step_apart(stages: Sequence[Any], values: Any) -> Any:
    runs: list[tuple[list[Tensor], Any]] = []
    for stage in stages:
        received = [sent(*pair) for pair in zip(values, stage.summary.receives, strict=True)]
        values = stage(*received)
        runs.append((received, values))
    summed(values).backward()
    for (_, given), (received, _) in reversed(list(pairwise(runs))):
        pairs = [(value, copy.grad) for value, copy in zip(given, received, strict=True) if copy.grad is not None]
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
    return values
