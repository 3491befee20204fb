"""Running a captured step over and over in a rank: its first state, its batches, its graphs, and what each step leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.batch import RankBatches, batch_of
from pytest_fxbucket.capture.from_plan import import_model
from pytest_fxbucket.capture.override.calls import keep_for_calls, modules_called_by
from pytest_fxbucket.capture.parallel.context_parallel import cut_sequences
from pytest_fxbucket.capture.parallel.parts import ParameterShards
from pytest_fxbucket.capture.parallel.sequence_parallel import place_name
from pytest_fxbucket.capture.unregistered import unregistered_tensors
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.step.iterations import Iterating, Results
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.portable import PortableGraph

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.schema_model import Model, Parallel
    from pytest_fxbucket.step.roles import Key, OptimizerBuilder, Parameter, Phase, StepGraph, Value

LEARNING_RATE = 0.03125
"""Of the fixed SGD update between steps: a power of two, so that the update itself rounds as little as can be."""

KEPT = ("param", "buffer", "held", "state", "hyper")
"""Roles of the inputs that live on from step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask:
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
    """What :class:`StepTask` holds of one graph of ``step``, which was captured from ``plan``."""
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
    rank: int, step: StepTask, on_built: Callable[[Mapping[str, torch.Tensor]], None] = lambda _: None
) -> tuple[list[torch.Tensor], Callable[[int], list[torch.Tensor]]]:
    """Parameters, buffers and the optimizer's state to begin with, in input order; and the batch of a step.

    ``on_built`` is shown whole parameters and buffers, by FQN.
    """
    if step.model is None:
        split = [value.role in KEPT for value in step.inputs]
        # The first input that is not kept must not stand before the last one that is.
        if True in split and False in split and split.index(False) < len(split) - 1 - split[::-1].index(True):
            raise CaptureError("inputs of a traced graph must list parameters and buffers before everything else")
        state = [t.detach() for t, kept in zip(step.example_inputs, split, strict=True) if kept]
        rest = [t.detach() for t, kept in zip(step.example_inputs, split, strict=True) if not kept]
        return state, lambda _: rest
    factory, batch, _ = import_model(step.model, step.where)
    # All ranks build the same whole model from one seed; each then takes its own parts.
    torch.manual_seed(step.seed)
    model = factory(**step.model.args)
    whole = {fqn: p.detach() for fqn, p in model.named_parameters()} | dict(model.named_buffers())
    on_built(whole)
    parts = ParameterShards.of(step.parallel, step.mesh)
    own = {parameter.fqn: parts.of_rank(whole[parameter.fqn], parameter, rank) for parameter in step.parameters}
    kept = {("param", fqn): part for fqn, part in own.items()}
    kept |= {("buffer", fqn): buffer for fqn, buffer in model.named_buffers()}
    # One graph serves all ranks along cp and tp, so it is told by an input where along them it runs.
    kept |= {("buffer", place_name(dim)): torch.tensor(step.mesh.at(rank, dim)) for dim in ("cp", "tp")}
    here = step.mesh.data_rank(rank)
    if held := [value.fqn for value in step.inputs if value.role == "held"]:
        batch(here, 0)  # which was called before the step was traced, too, and may have made them
        there = unregistered_tensors(model)
        if missing := [name for name in held if name not in there]:
            raise CaptureError(
                f"{step.where}: {missing[0]}, a tensor that forward uses and that is no buffer, is not there in the ranks once "
                "factory and batch have run; make it in one of them, or register it with register_buffer"
            )
        kept |= {("held", name): tensor for name, tensor in there.items()}
    if step.optimizing is not None:
        kept |= step.optimizing.state(own, {value.fqn for value in step.outputs if value.role == "grad"})
    kept |= {("state", fqn): tensor.clone() for fqn, tensor in step.first_state.items()}
    state = [kept[value.key] for value in step.inputs if value.role in KEPT]
    # Last, since it takes the parameters away from modules that the graph calls.
    keep_for_calls(model, step.called)

    followed = RankBatches(step.model.batch, here, step.inputs)
    return state, lambda number: followed.tensors(cut_sequences(batch_of(batch(here, number)), step.mesh, rank), number)


def begun_with(
    start: Sequence[torch.Tensor], task: StepTask, inputs: Sequence[Value], first_state: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """First tensors of ``inputs``: those that ``task`` has, too, are in ``start``; others are state, from ``first_state``."""
    kept = (value for value in task.inputs if value.role in KEPT)
    known = {value.key: tensor for value, tensor in zip(kept, start, strict=True)}
    wanted = (value.key for value in inputs if value.role in KEPT)
    return [known[key] if key in known else first_state[key[1]] for key in wanted]


def placed(start: Sequence[torch.Tensor], inputs: Sequence[Value], numbers: Collection[Key]) -> list[torch.Tensor]:
    """Copies of the first tensors of ``inputs`` on the device of this rank, but for ``numbers``, which stay on the CPU."""
    kept = (value for value in inputs if value.role in KEPT)
    return [
        tensor.to("cpu" if value.key in numbers else device(), copy=True) for value, tensor in zip(kept, start, strict=True)
    ]


def update(state: list[torch.Tensor], results: Sequence[Any], step: StepTask) -> None:
    """Write the step's new parameters and state into ``state``; without an optimizer, take one SGD step on the local shards."""
    made = {v.key: r for v, r in zip(step.outputs, results, strict=True)}
    has_optimizer = any(role == "param" for role, _ in made)
    kept = (value for value in step.inputs if value.role in KEPT)
    for value, tensor in zip(kept, state, strict=True):
        if value.key in made:
            tensor.copy_(made[value.key])
        elif value.role == "param" and not has_optimizer and ("grad", value.fqn) in made:
            tensor.add_(made["grad", value.fqn].to(tensor.dtype), alpha=-LEARNING_RATE)


# How a rank runs a step over and over: as one graph, or as the three of a step whose work crosses iterations.


Seen = tuple[str, "fx.GraphModule", dict[str, str]]
"""Name of a graph, itself, and by node a digest of what it gave."""
Watch = Callable[..., tuple[Any, dict[str, str]]]
"""Runs a graph on tensors, and gives its results with a digest of each node's."""


@dataclass(frozen=True, slots=True)
class PhaseGraph:
    """One of the graphs of a step whose work crosses iterations; plain data that goes to the ranks."""

    phase: Phase
    graph: PortableGraph
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step gave, as if it was the last."""

    inputs_after: list[torch.Tensor]
    """Every input as the step left it."""
    results: list[Any]
    late: Mapping[Key, torch.Tensor]
    """What this call gave of the step before: new parameters, state and gradients of what moved."""


class StepRun:
    """Takes steps of ``task``, and keeps their ``state``, in input order."""

    def __init__(self, state: list[torch.Tensor], task: StepTask) -> None:
        self.state, self.task = state, task
        self.watch: Watch | None = None
        """What runs graphs, if they are to be looked at."""
        self.seen: list[Seen] = []
        """One entry for each graph that was run under ``watch``."""

    def step(self, batch: Sequence[torch.Tensor], number: int, count: int) -> StepOutcome:
        """Take step ``number`` of ``count``, from 1."""
        raise NotImplementedError

    def call(self, name: str, graph: fx.GraphModule, *given: torch.Tensor) -> list[Any]:
        """Results of ``graph``."""
        if self.watch is None:
            results = graph(*given)
        else:
            results, digests = self.watch(graph, *given)
            self.seen.append((name, graph, digests))
        return list(results) if isinstance(results, (list, tuple)) else [results]


class OneGraph(StepRun):
    """A step as one graph. ``name`` begins its marks."""

    def __init__(self, graph: fx.GraphModule, state: list[torch.Tensor], task: StepTask, name: str) -> None:
        super().__init__(state, task)
        self.graph, self.name = graph, name

    def step(self, batch: Sequence[torch.Tensor], number: int, count: int) -> StepOutcome:
        """Take step ``number`` of ``count``, from 1."""
        mark(f"{self.name} step {number} of {count}")
        kept, others = iter(self.state), iter(batch)
        given = [next(kept) if value.role in KEPT else next(others) for value in self.task.inputs]
        results = self.call(self.name, self.graph, *given)
        update(self.state, results, self.task)
        return StepOutcome(given, results, {})


class ThreeGraphs(StepRun):
    """A step whose work crosses iterations: its rest is done on copies of the state, and after the last step in place."""

    def __init__(
        self, graphs: Mapping[Phase, fx.GraphModule], described: Sequence[PhaseGraph], state: list[torch.Tensor], task: StepTask
    ) -> None:
        super().__init__(state, task)
        calls = {phase: partial(self.call, phase, graph) for phase, graph in graphs.items()}
        inputs, outputs = {one.phase: one.inputs for one in described}, {one.phase: one.outputs for one in described}
        self.iterating = Iterating(calls, inputs, outputs)
        # What cleanup gives is what a steady call gives for the step before.
        self.moved = {value.key for value in outputs["cleanup"]}
        self.moved_names = {node.name for node in graphs["cleanup"].graph.nodes}

    def step(self, batch: Sequence[torch.Tensor], number: int, count: int) -> StepOutcome:
        """Take step ``number`` of ``count``, from 1."""
        of_step = f"step {number} of {count}"
        mark(f"{self.iterating.phase} {of_step}")
        was_pending = self.iterating.pending
        results = by_key(self.iterating.step(lambda values: self.take(values, self.state, batch)))
        self.keep(self.state, results)
        # What the steady graph gives of moved values is the step before's; this step's come from cleanup below.
        late: dict[Key, Any] = {key: results.pop(key) for key in self.moved if was_pending}
        # On copies, since the next call does the rest of this step itself.
        state = self.state if number == count else [tensor.clone() for tensor in self.state]
        mark(f"cleanup {of_step}")
        rest = by_key(self.iterating.rest(lambda values: self.take(values, state, batch)))
        self.keep(state, rest)
        results.update(rest)
        if number == count:
            self.iterating.forget()
        given = self.take(self.task.inputs, state, batch)
        return StepOutcome(given, [results[value.key] for value in self.task.outputs], late)

    def take(self, values: Sequence[Value], state: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of ``values``."""
        kept, others = iter(state), iter(batch)
        of = {v.key: next(kept) if v.role in KEPT else next(others) for v in self.task.inputs}
        return [of[value.key] for value in values]

    def keep(self, state: Sequence[torch.Tensor], results: Mapping[Key, Any]) -> None:
        """Write new parameters, buffers and state into ``state``."""
        kept = [value for value in self.task.inputs if value.role in KEPT]
        for value, tensor in zip(kept, state, strict=True):
            if value.key in results:
                tensor.copy_(results[value.key])


def by_key(results: Results) -> dict[Key, Any]:
    """``results`` by role and name."""
    return {value.key: made for value, made in results}


def set_rates(runs: Sequence[StepRun], taken: int) -> None:
    """Give ``runs`` the learning rates of their schedules behind ``taken`` steps; those without shrink by :func:`factors`."""
    by, scheduled = factors(runs[0].task), rates_after(runs[0].task, taken)
    for one in runs:
        kept = [value for value in one.task.inputs if value.role in KEPT]
        for value, tensor in zip(kept, one.state, strict=True):
            if value.fqn in scheduled and value.role == "hyper":
                tensor.fill_(scheduled[value.fqn])
            elif value.role == "hyper":
                tensor.mul_(by[value.fqn])


def rates_of(run: StepRun) -> dict[str, float]:
    """Its learning rates as they are now, by name."""
    kept = [value for value in run.task.inputs if value.role in KEPT]
    return {value.fqn: float(one) for value, one in zip(kept, run.state, strict=True) if value.role == "hyper"}


def rates_after(task: StepTask, taken: int) -> dict[str, float]:
    """Learning rates behind ``taken`` steps that a schedule says, by name."""
    return {} if task.optimizing is None else task.optimizing.rates_after(taken, task.parameters)


def factors(task: StepTask) -> dict[str, float]:
    """The factor by which each learning rate shrinks between steps; all differ, so that one of another step or group shows."""
    rates = [value.fqn for value in task.inputs if value.role == "hyper"]
    return {fqn: 1 - 0.5 / (2 + number) for number, fqn in enumerate(rates)}
