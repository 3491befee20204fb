"""What ranks need to run a captured step over and over: its state to begin with, its batches, and what a step leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.batches import Followed
from pytest_fxbucket.capture.from_plan import import_model
from pytest_fxbucket.capture.held import held_tensors
from pytest_fxbucket.capture.mesh import Mesh
from pytest_fxbucket.capture.override.calls import keep_for_calls, modules_called_by
from pytest_fxbucket.capture.parallel.parts import Parts
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import OptimizerBuilder, Parameter, Phase, StepGraph, Value
    from pytest_fxbucket.plan.schema import Model, Parallel, Plan

LEARNING_RATE = 0.03125
"""Of the fixed SGD update between steps: a power of two, so that the update itself rounds as little as can be."""

KEPT = ("param", "buffer", "held", "state", "hyper")
"""Roles of what lives on from step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """A captured step, as far as running it over and over goes; plain data for the ranks."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    model: Model | None
    example_inputs: tuple[torch.Tensor, ...]
    """Of a graph that somebody else traced; used instead of a model."""
    seed: int
    where: str
    """Plan file, for errors."""
    mesh: Mesh
    parallel: Parallel
    parameters: tuple[Parameter, ...]
    optimizing: OptimizerBuilder | None
    first_state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """First tensors of state that is no optimizer's, by FQN."""
    called: tuple[str, ...] = ()
    """FQNs of the modules that the graph calls."""


def fields_of(plan: Plan, mesh: Mesh, step: StepGraph, phase: Phase) -> dict[str, Any]:
    """What :class:`Stepping` holds of one graph of ``step``, which was captured from ``plan``."""
    return {
        "inputs": step.inputs[phase],
        "outputs": step.outputs[phase],
        "model": plan.model,
        "example_inputs": step.example_inputs.get(phase, ()),
        "seed": plan.run.seed,
        "where": str(plan.path),
        "mesh": mesh,
        "parallel": plan.parallel,
        "parameters": step.parameters,
        "optimizing": step.optimizing,
        "first_state": step.first_state,
        "called": modules_called_by(step.graphs[phase].graph),
    }


def state_and_batches(
    rank: int, step: Stepping, on_built: Callable[[Mapping[str, torch.Tensor]], None] = lambda _: None
) -> tuple[list[torch.Tensor], Callable[[int], list[torch.Tensor]]]:
    """Parameters, buffers and the optimizer's state to begin with, in input order; and the batch of a step.

    ``on_built`` is shown whole parameters and buffers, by FQN.
    """
    if step.model is None:
        split = [value.role in KEPT for value in step.inputs]
        if True in split and False in split and split.index(False) < len(split) - 1 - split[::-1].index(True):
            raise CaptureError("inputs of a traced graph must list parameters and buffers before everything else")
        state = [t.detach() for t, kept in zip(step.example_inputs, split, strict=True) if kept]
        rest = [t.detach() for t, kept in zip(step.example_inputs, split, strict=True) if not kept]
        return state, lambda _: rest
    factory, batch, _ = import_model(step.model, step.where)
    torch.manual_seed(step.seed)
    model = factory(**step.model.args)
    whole = {fqn: p.detach() for fqn, p in model.named_parameters()} | dict(model.named_buffers())
    on_built(whole)
    parts = Parts.of(step.parallel, step.mesh)
    own = {parameter.fqn: parts.of_rank(whole[parameter.fqn], parameter, rank) for parameter in step.parameters}
    kept = {("param", fqn): part for fqn, part in own.items()}
    kept |= {("buffer", fqn): buffer for fqn, buffer in model.named_buffers()}
    here = step.mesh.data_rank(rank)
    if held := [value.fqn for value in step.inputs if value.role == "held"]:
        batch(here, 0)  # which was called before the step was traced, too, and may have made them
        there = held_tensors(model)
        if missing := [name for name in held if name not in there]:
            raise CaptureError(
                f"{step.where}: {missing[0]}, a tensor that forward uses and that is no buffer, is not there in the ranks once "
                "factory and batch have run; make it in one of them, or register it with register_buffer"
            )
        kept |= {("held", name): tensor for name, tensor in there.items()}
    if step.optimizing is not None:
        kept |= step.optimizing.state(own, {value.fqn for value in step.outputs if value.role == "grad"})
    kept |= {("state", fqn): tensor.clone() for fqn, tensor in step.first_state.items()}
    state = [kept[value.role, value.fqn] for value in step.inputs if value.role in KEPT]
    keep_for_calls(model, step.called)

    followed = Followed(step.model.batch, here, step.inputs)
    return state, lambda number: followed.tensors(batch(here, number), number)


def update(state: list[torch.Tensor], results: Sequence[Any], step: Stepping) -> None:
    """What the step made of parameters and state; of a step without optimizer one SGD step on the local shards."""
    made = {(v.role, v.fqn): r for v, r in zip(step.outputs, results, strict=True)}
    has_optimizer = any(role == "param" for role, _ in made)
    for value, tensor in zip(step.inputs, state, strict=False):
        if (value.role, value.fqn) in made:
            tensor.copy_(made[value.role, value.fqn])
        elif value.role == "param" and not has_optimizer and ("grad", value.fqn) in made:
            tensor.add_(made["grad", value.fqn].to(tensor.dtype), alpha=-LEARNING_RATE)
