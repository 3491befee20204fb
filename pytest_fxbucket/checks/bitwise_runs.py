"""How a rank runs a step over and over: as one graph, or as the three of a step whose work crosses iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pytest_fxbucket.graph.portable import PortableGraph
from pytest_fxbucket.iterating import Iterating, Results
from pytest_fxbucket.ranks import mark
from pytest_fxbucket.stepping import KEPT, Stepping, update

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Phase, Value

Key = tuple[str, str]
"""Role and name of a value."""
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
class Took:
    """One step, as if it was the last."""

    given: list[torch.Tensor]
    """Every input as the step left it."""
    results: list[Any]
    late: Mapping[Key, torch.Tensor]
    """What this call gave of the step before: new parameters, state and gradients of what moved."""


class Run(Protocol):
    """Takes steps, and keeps their state, in input order."""

    task: Stepping
    """Of the step that is run: its inputs and outputs."""
    state: list[torch.Tensor]
    watch: Watch | None
    """What runs graphs, if they are to be looked at."""
    seen: list[Seen]
    """Of each graph that was run so."""

    def step(self, batch: Sequence[torch.Tensor], number: int, count: int) -> Took:
        """Take step ``number`` of ``count``, from 1."""


class _Watched:
    """Runs graphs, and keeps what is seen in them if asked to."""

    def __init__(self, state: list[torch.Tensor]) -> None:
        self.state = state
        self.watch: Watch | None = None
        self.seen: list[Seen] = []

    def call(self, name: str, graph: fx.GraphModule, *given: torch.Tensor) -> list[Any]:
        """Results of ``graph``."""
        if self.watch is None:
            results = graph(*given)
        else:
            results, digests = self.watch(graph, *given)
            self.seen.append((name, graph, digests))
        return list(results) if isinstance(results, (list, tuple)) else [results]


class OneGraph(_Watched):
    """A step as one graph. ``name`` begins its marks."""

    def __init__(self, graph: fx.GraphModule, state: list[torch.Tensor], task: Stepping, name: str) -> None:
        super().__init__(state)
        self.graph, self.task, self.name = graph, task, name

    def step(self, batch: Sequence[torch.Tensor], number: int, count: int) -> Took:
        """Take step ``number`` of ``count``, from 1."""
        mark(f"{self.name} step {number} of {count}")
        kept, others = iter(self.state), iter(batch)
        given = [next(kept) if value.role in KEPT else next(others) for value in self.task.inputs]
        results = self.call(self.name, self.graph, *given)
        update(self.state, results, self.task)
        return Took(given, results, {})


class ThreeGraphs(_Watched):
    """A step whose work crosses iterations: finished after each step, on copies of the state, and after the last in truth."""

    def __init__(
        self, graphs: Mapping[Phase, fx.GraphModule], described: Sequence[PhaseGraph], state: list[torch.Tensor], task: Stepping
    ) -> None:
        super().__init__(state)
        self.task = task
        calls = {phase: partial(self.call, phase, graph) for phase, graph in graphs.items()}
        inputs, outputs = {one.phase: one.inputs for one in described}, {one.phase: one.outputs for one in described}
        self.iterating = Iterating(calls, inputs, outputs)
        self.moved = {(value.role, value.fqn) for value in outputs["cleanup"]}
        self.moved_names = {node.name for node in graphs["cleanup"].graph.nodes}

    def step(self, batch: Sequence[torch.Tensor], number: int, count: int) -> Took:
        """Take step ``number`` of ``count``, from 1."""
        of_step = f"step {number} of {count}"
        mark(f"{self.iterating.phase} {of_step}")
        was_pending = self.iterating.pending
        results = _by_key(self.iterating.step(lambda values: self.take(values, self.state, batch)))
        self.keep(self.state, results)
        late: dict[Key, Any] = {key: results.pop(key) for key in self.moved if was_pending}
        state = self.state if number == count else [tensor.clone() for tensor in self.state]
        mark(f"cleanup {of_step}")
        rest = _by_key(self.iterating.rest(lambda values: self.take(values, state, batch)))
        self.keep(state, rest)
        results.update(rest)
        if number == count:
            self.iterating.forget()
        given = self.take(self.task.inputs, state, batch)
        return Took(given, [results[value.role, value.fqn] for value in self.task.outputs], late)

    def take(self, values: Sequence[Value], state: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of ``values``."""
        kept = iter(state)
        others = iter(batch)
        of = {(v.role, v.fqn): next(kept) if v.role in KEPT else next(others) for v in self.task.inputs}
        return [of[value.role, value.fqn] for value in values]

    def keep(self, state: Sequence[torch.Tensor], results: Mapping[Key, Any]) -> None:
        """Write new parameters, buffers and state into ``state``."""
        kept = [value for value in self.task.inputs if value.role in KEPT]
        for value, tensor in zip(kept, state, strict=True):
            if (value.role, value.fqn) in results:
                tensor.copy_(results[value.role, value.fqn])


def _by_key(results: Results) -> dict[Key, Any]:
    return {(value.role, value.fqn): made for value, made in results}


def decay(runs: Sequence[Run]) -> None:
    """Shrink the learning rates of ``runs`` by :func:`factors`."""
    by = factors(runs[0].task)
    for one in runs:
        kept = [value for value in one.task.inputs if value.role in KEPT]
        for value, tensor in zip(kept, one.state, strict=True):
            if value.role == "hyper":
                tensor.mul_(by[value.fqn])


def factors(task: Stepping) -> dict[str, float]:
    """What each learning rate shrinks by between steps, each by its own: one of another step or group would show."""
    rates = [value.fqn for value in task.inputs if value.role == "hyper"]
    return {fqn: 1 - 0.5 / (2 + number) for number, fqn in enumerate(rates)}
