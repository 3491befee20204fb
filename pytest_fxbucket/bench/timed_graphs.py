"""Runs in the ranks: one graph of a step as it is timed, with its own state; where work crosses iterations the steady one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.capture.from_plan import import_model
from pytest_fxbucket.checks.devices import place
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.ranks import device
from pytest_fxbucket.step.mesh import make_groups
from pytest_fxbucket.step.portable import decode, digest, encode_module
from pytest_fxbucket.step_runner import (
    KEPT,
    PhaseGraph,
    StepTask,
    ThreeGraphs,
    begun_with,
    by_key,
    placed,
    state_and_batches,
    update,
)

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import ActivityMark
    from pytest_fxbucket.step.roles import Key, Value


@dataclass(frozen=True, slots=True)
class TimedVariant:
    """A variant of one graph of a step; plain data."""

    graphs: tuple[PhaseGraph, ...]
    """One graph; or set-up, steady and clean-up where work crosses iterations."""
    inputs: tuple[Value, ...]
    """Inputs of all the graphs, without carried values; a transformation may have added some."""
    outputs: tuple[Value, ...]
    first_state: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingPhase(StepTask):
    """One graph of a step in all its variants; a step runs its phases one after another."""

    variants: Mapping[str, TimedVariant]
    """By name."""
    marks: Mapping[str, tuple[ActivityMark, ...]] = field(default_factory=dict)
    """By variant, where the clock is read in a traced step."""


def ready_graphs(
    rank: int, task: StepTask, sent: Sequence[PhaseGraph]
) -> tuple[dict[str, fx.GraphModule], tuple[str, ...], frozenset[Key]]:
    """The graphs that ``rank`` was sent, by phase, with their process groups and on its device; and their digests.

    The keys are those of inputs that stay on the CPU, as :func:`~pytest_fxbucket.checks.devices.place` gives them.
    """
    if task.model is not None:
        import_model(task.model, task.where)  # it may register operators that the graphs call
    graphs = {one.phase: decode(one.graph) for one in sent}
    # Before anything is changed: they are compared with the digests of the graphs that were sent.
    digests = tuple(digest(encode_module(graph)) for graph in graphs.values())
    make_groups(task.mesh, rank)
    for graph in graphs.values():
        ensure_twins(graph.graph)  # a twin is made from its group, which must be there
    return graphs, digests, place([(graphs[one.phase], one.inputs) for one in sent], device())


class TimedGraph:
    """A variant of one phase: :attr:`graph` is timed, and its state goes on from step to step as in training."""

    def __init__(self, rank: int, phase: TimingPhase, variant: TimedVariant) -> None:
        self._graphs, self.digests, numbers = ready_graphs(rank, phase, variant.graphs)
        start, batches = state_and_batches(rank, phase)
        begun = begun_with(start, phase, variant.inputs, variant.first_state)
        self._task = replace(phase, inputs=variant.inputs, outputs=variant.outputs)
        self.state = placed(begun, variant.inputs, numbers)
        self._batch = [tensor.to(device()) for tensor in batches(0)]

    @property
    def graph(self) -> fx.GraphModule:
        """The graph that is timed."""
        (graph,) = self._graphs.values()
        return graph

    def arguments(self) -> Sequence[Any]:
        """The arguments of a call."""
        # The batch is copied, so that no call can change what the next one gets; state is meant to change.
        kept, others = iter(self.state), (tensor.clone() for tensor in self._batch)
        return [next(kept) if value.role in KEPT else next(others) for value in self._task.inputs]

    def take_results(self, made: Sequence[Any]) -> None:
        """Make the results of a call the new state."""
        update(self.state, made, self._task)

    def finish(self) -> None:
        """Do what the last step left."""


class SteadyGraph(TimedGraph):
    """Like its base, for a step whose work crosses iterations: set-up runs before the first call, clean-up after the last."""

    def __init__(self, rank: int, phase: TimingPhase, variant: TimedVariant) -> None:
        super().__init__(rank, phase, variant)
        self._run = ThreeGraphs(self._graphs, variant.graphs, self.state, self._task)

    @property
    def graph(self) -> fx.GraphModule:
        """The graph that is timed."""
        return self._graphs["steady"]

    def arguments(self) -> Sequence[Any]:
        """The arguments of a call; before the first call this runs set-up."""
        iterating = self._run.iterating
        # Arguments are made before the clock starts, so that the step that set-up takes is not timed.
        if not iterating.pending:
            self._run.keep(self.state, by_key(iterating.step(self._take)))
        return iterating.arguments("steady", self._take)

    def take_results(self, made: Sequence[Any]) -> None:
        """Make the results of a call the new state, and keep carried values for the next call."""
        self._run.keep(self.state, by_key(self._run.iterating.take_results("steady", made)))

    def finish(self) -> None:
        """Do what the last step left."""
        self._run.keep(self.state, by_key(self._run.iterating.rest(self._take)))
        self._run.iterating.forget()

    def _take(self, values: Sequence[Value]) -> Sequence[torch.Tensor]:
        return self._run.take(values, self.state, [tensor.clone() for tensor in self._batch])


def timed_graph(rank: int, phase: TimingPhase, name: str) -> TimedGraph:
    """The variant ``name`` of ``phase``."""
    variant = phase.variants[name]
    return (SteadyGraph if variant.graphs[1:] else TimedGraph)(rank, phase, variant)  # more than one: set-up, steady, clean-up
