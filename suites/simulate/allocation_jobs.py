"""Runs in the ranks: what a step really allocates, counted at dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import finalize

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from pytest_fxbucket.checks.bitwise.job import BitwiseTask, final_run, graphs_of
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode, storage_key
from pytest_fxbucket.graph.collectives import flight
from pytest_fxbucket.step.iterations import Results, Take
from pytest_fxbucket.step_runner import OneGraph, StepRun, ThreeGraphs, placed, state_and_batches


@dataclass(slots=True)
class Counted:
    """What a rank allocated in one step."""

    peak: int = 0
    """Most bytes of storages that lived at once, those of its state and batch among them."""
    by_graph: dict[str, int] = field(default_factory=dict)
    """Peak while each graph ran."""
    at: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Of each graph's last run: by operator in order the bytes that lived when it was done."""


class Counting(TorchDispatchMode):
    """Counts bytes of storages while entered, from the operator that makes or first takes them until they are freed.

    What is gathered from, reduced, or sent to all is held until its wait, as by NCCL: this process' groups may copy it instead.
    """

    def __init__(self, graphs: Mapping[str, fx.GraphModule]) -> None:
        super().__init__()
        self.counted, self._graphs, self._graph = Counted(), graphs, ""
        self._bytes: dict[int, int] = {}
        self._live = 0
        self._sent: dict[int, list[torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.see(tree_leaves((args, kwargs)))
        before = self._live
        made = func(*args, **(kwargs or {}))
        self.see(tree_leaves(made))
        self._note(str(func), before)
        kind = flight(func)
        if kind == "wait":
            self._sent.pop(storage_key(made), None)
        elif kind in ("all_gather", "reduce_scatter", "all_to_all"):
            sent = [one for one in tree_leaves(args[0]) if isinstance(one, torch.Tensor)]
            self._sent.update({storage_key(one): sent for one in tree_leaves(made)})
        return made

    def see(self, values: Sequence[object]) -> None:
        """Count the storages of the tensors among ``values``."""
        for value in values:
            if isinstance(value, torch.Tensor) and (key := storage_key(value)) not in self._bytes:
                storage = value.untyped_storage()
                self._bytes[key] = storage.nbytes()
                self._live += storage.nbytes()
                finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._bytes.pop(key)

    def _note(self, name: str, before: int = 0) -> None:
        live = max(before, self._live)
        self.counted.peak = max(self.counted.peak, live)
        if self._graph:
            self.counted.by_graph[self._graph] = max(self.counted.by_graph.get(self._graph, 0), live)
            self.counted.at[self._graph].append((name, live))

    def watch(self, graph: fx.GraphModule, *given: torch.Tensor) -> tuple[Any, dict[str, str]]:
        """Run ``graph``."""
        self._graph = next(name for name, one in self._graphs.items() if one is graph)
        self.counted.at[self._graph] = []
        self._note("begin")
        results = graph(*given)
        self._graph = ""
        return results, {}


def count(rank: int, world: int, task: BitwiseTask) -> tuple[Counted, ...]:
    """What the unbucketed and the final step allocated, in their second step each."""
    graphs, _, numbers = graphs_of(rank, task, {"unbucketed": task.unbucketed})
    start, batches = state_and_batches(rank, task)
    first = replace(task)
    found = []
    for run in (
        lambda: OneGraph(graphs["unbucketed"], placed(start, task.inputs, numbers), first, "unbucketed"),
        lambda: final_run(graphs, start, task, numbers),
    ):
        found.append(_counted(run(), graphs, batches, task))
    return tuple(found)


def _counted(run: StepRun, graphs: Mapping[str, fx.GraphModule], batches: Any, task: BitwiseTask) -> Counted:
    counting = Counting(graphs)
    counting.see(run.state)
    run.watch = counting.watch
    for step in range(2):
        batch = [tensor.clone() for tensor in batches(step)]
        counting.see(batch)
        torch.manual_seed(task.seed + step)
        with counting:
            if isinstance(run, ThreeGraphs):
                _call(run, run.iterating.step, batch)
            else:
                run.step(batch, step + 1, 2)
        run.seen.clear()
    if isinstance(run, ThreeGraphs):
        with counting:
            _call(run, run.iterating.rest, batch)
    return counting.counted


def _call(run: ThreeGraphs, call: Callable[[Take], Results], batch: Sequence[torch.Tensor]) -> None:
    """As a trainer does, which keeps nothing but state."""
    made = call(lambda values: run.take(values, run.state, batch))
    run.keep(run.state, {(value.role, value.fqn): one for value, one in made})
