"""Steps of an update's graph on real tensors beside eager's, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pytest_fxbucket.capture.clip import Clip
from pytest_fxbucket.capture.optimizers.state import make_state, rates, state_tensors
from pytest_fxbucket.capture.optimizers.update import TracedUpdate, trace_update
from pytest_fxbucket.step.roles import Value

Tensors = dict[str, torch.Tensor]
Build = Callable[[Mapping[str, torch.Tensor]], Sequence[torch.optim.Optimizer]]


def shards(dtypes: Sequence[torch.dtype] = (torch.float32,), seed: int = 0) -> Tensors:
    """Matrices, LayerNorm's vectors, a bias and a scale of one element, of each dtype."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"layers.0.w": (5, 7), "layers.0.norm.weight": (7,), "layers.0.norm.bias": (7,), "scale": (1,), "out.bias": (33,)}
    return {
        (fqn if dtype is dtypes[0] else f"{fqn}_{str(dtype)[6:]}"): torch.randn(shape, generator=draw).to(dtype)
        for dtype in dtypes
        for fqn, shape in shapes.items()
    }


def gradients(parameters: Tensors, step: int) -> Tensors:
    """A gradient for each, with zeros of both signs in it, one of them in every step, as of a unit that is dead."""
    found = {}
    for fqn, parameter in parameters.items():
        draw = torch.Generator().manual_seed(step * 100 + len(fqn))
        grad = torch.randn(parameter.shape, generator=draw)
        grad = torch.where(grad > 1, 0.0, torch.where(grad < -1, -0.0, grad))
        grad.view(-1)[1:2] = -0.0
        found[fqn] = grad.to(parameter.dtype)
    return found


def values(parameters: Tensors) -> list[Value]:
    return [Value("param", fqn, tuple(tensor.shape), tensor.dtype) for fqn, tensor in parameters.items()]


def eager(build: Build, parameters: Tensors, grads: Sequence[Tensors], lrs: Sequence[Any], max_norm: float = 0.0) -> Tensors:
    """Parameters and state after steps of the optimizers as everybody runs them; ``lrs`` scale the first learning rates."""
    held = {fqn: torch.nn.Parameter(tensor.clone()) for fqn, tensor in parameters.items()}
    optimizers = list(build(held))
    first = [[group.get("lr") for group in optimizer.param_groups] for optimizer in optimizers]
    for grad, lr in zip(grads, lrs, strict=True):
        for fqn, parameter in held.items():
            parameter.grad = grad[fqn].clone() if fqn in grad else None
        if max_norm:
            torch.nn.utils.clip_grad_norm_(held.values(), max_norm)
        for optimizer, before in zip(optimizers, first, strict=True):
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate * lr
            optimizer.step()
    return {fqn: tensor.detach() for fqn, tensor in held.items()} | {s.fqn: s.tensor for s in state_tensors(optimizers, held)}


def graph(build: Build, parameters: Tensors, grads: Sequence[Tensors], lrs: Sequence[Any], max_norm: float = 0.0) -> Tensors:
    """The same after steps of the update's graph, whose state starts as ``make_state`` makes it."""
    update = trace_update(build, values(parameters), list(grads[0]), Clip(max_norm) if max_norm else None)
    now, first = beginning(build, parameters, list(grads[0]))
    for grad, lr in zip(grads, lrs, strict=True):
        step(update, now, grad, {name: rate * lr for name, rate in first.items()})
    return now


def beginning(build: Build, parameters: Tensors, with_gradient: Sequence[str]) -> tuple[Tensors, dict[str, float]]:
    """Parameters and state before the first step, and learning rates."""
    held = {fqn: tensor.clone() for fqn, tensor in parameters.items()}
    optimizers = list(build(held))
    make_state(optimizers, [held[fqn] for fqn in with_gradient])
    return held | {state.fqn: state.tensor for state in state_tensors(optimizers, held)}, rates(optimizers)


def step(update: TracedUpdate, now: Tensors, grad: Tensors, lrs: dict[str, float]) -> None:
    """One step of the graph; brings ``now`` up to date."""
    hypers = {name: torch.tensor(rate, dtype=torch.float64) for name, rate in lrs.items()}
    sources = {"param": now, "state": now, "grad": grad, "hyper": hypers}
    given = [sources[value.role][value.fqn] for value in update.inputs]
    assert [(tuple(t.shape), t.dtype) for t in given] == [(value.shape, value.dtype) for value in update.inputs]
    results = update.graph_module(*given)
    now.update({value.fqn: result for value, result in zip(update.outputs, results, strict=True)})
