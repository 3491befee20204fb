"""Runs a step in pipeline stages on this rank: torch's schedule says what comes next, the stages' graphs compute it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.batch import microbatches
from pytest_fxbucket.compat.pipelining import run_schedule, schedule_on_ranks
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.pipeline.rank_stage import Crossed, RunnableStage
from pytest_fxbucket.pipeline.schedules import GATHERS, leaves, table_of
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.step.pipelined import TIES, UPDATE, Pipelined, Work, phase_of, stage_of
from pytest_fxbucket.step_runner import KEPT, PhaseGraph, StepOutcome, StepRun, StepTask, by_key, update
from pytest_fxbucket.words import times

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.roles import Key, Value

_ONCE: tuple[Work, ...] = ("unshard", "reduce")
"""Work that a stage does once a step."""


@dataclass(frozen=True, slots=True)
class PipelinedTask:
    """What a rank needs to run its stages; plain data."""

    how: Pipelined
    graphs: tuple[PhaseGraph, ...]
    order: tuple[str, ...]
    """Actions that torch's schedule must ask of the rank's stages, in order, by the table that was checked."""

    @classmethod
    def of(cls, how: Pipelined, place: int, graphs: Iterable[PhaseGraph]) -> PipelinedTask:
        """The task of the rank at ``place`` along pp."""
        table = table_of(how.schedule, how.stages, max(how.pp_places) + 1, how.microbatches)
        # Without gathers: a stage gathers once a step, however often the table says UNSHARD and RESHARD.
        order = (action.token for action in leaves(table.ranks[place]) if action.kind not in GATHERS)
        return cls(how, tuple(graphs), tuple(order))


class PipelinedRun(StepRun):
    """Runs steps of ``task``, whose inputs and outputs are this rank's share of the step's."""

    def __init__(
        self, graphs: Mapping[str, fx.GraphModule], pipelined: PipelinedTask, state: list[torch.Tensor], task: StepTask
    ) -> None:
        super().__init__(state, task)
        self._graphs, self._described = graphs, {one.phase: one for one in pipelined.graphs}
        self._how, self._order, self._step = pipelined.how, list(pipelined.order), ""
        self._asked: list[str] = []
        self._ran = Counter[tuple[str, int | None]]()
        here = sorted({stage for one in pipelined.graphs if (stage := stage_of(one.phase)) is not None})
        self._stages = [
            RunnableStage(index, self._how, device(), self._run_of_stage, self._sums(index), self._asked) for index in here
        ]
        by_index = {stage.stage_index: stage for stage in self._stages}
        self._schedule = schedule_on_ranks(
            self._how.schedule, self._stages, self._how.microbatches, lambda index: by_index[index].unshard()
        )

    def step(self, batch: Sequence[torch.Tensor], number: int, count: int) -> StepOutcome:
        """Take step ``number`` of ``count``, from 1."""
        took = self.taken(batch, f"step {number} of {count}")
        update(self.state, took.results, self.task)
        return took

    def taken(self, batch: Sequence[torch.Tensor], step: str) -> StepOutcome:
        """Take a step without updating the state; ``step`` is the end of the marks that it leaves."""
        self._step = step
        kept, others = iter(self.state), iter(batch)
        given = [next(kept) if value.role in KEPT else next(others) for value in self.task.inputs]
        values = {value.key: tensor for value, tensor in zip(self.task.inputs, given, strict=True)}
        names = [value.fqn for value in self.task.inputs if value.role == "batch"]
        rows = [dict(zip(names, rows, strict=True)) for rows in microbatches(list(batch), self._how.microbatches)]
        self._asked.clear()
        self._ran.clear()
        for stage in self._stages:
            stage.begin(values, rows)
        run_schedule(self._schedule, self._how.microbatches)
        results = self._results()
        if UPDATE in self._described:
            results |= by_key(self._run(UPDATE, lambda value: (results if value.role == "grad" else values)[value.key]))
        self._refuse_another_step()
        return StepOutcome(given, [results[value.key] for value in self.task.outputs], {})

    def crossed(self) -> Iterator[tuple[bool, Crossed, torch.Tensor]]:
        """Like :meth:`RunnableStage.crossed`, for all stages of the rank."""
        for stage in self._stages:
            yield from stage.crossed()

    def _refuse_another_step(self) -> None:
        """Raise CaptureError unless torch asked for the table's actions in order, and each graph ran as often as it should."""
        if self._asked != self._order:
            pairs = enumerate(zip_longest(self._asked, self._order, fillvalue="nothing"), 1)
            at, asked, said = next((n, *pair) for n, pair in pairs if pair[0] != pair[1])
            raise CaptureError(
                f"{self._how.schedule} ran {asked} as action {at} of this rank, where the table that was checked has {said}"
            )
        for phase in self._described:
            once = (stage_of(phase) is None) or phase.endswith(_ONCE)
            for number in [None] if once else range(self._how.microbatches):
                if (ran := self._ran[phase, number]) != 1:
                    of = "" if number is None else f" of microbatch {number}"
                    raise CaptureError(f"{phase}{of} ran {times(ran)} in one step, expected once")

    def _results(self) -> dict[Key, Any]:
        """The loss, if a stage of this rank gives it, and the gradients; those of tied parameters are sums over stages."""
        results: dict[Key, Any] = {}
        each: dict[str, list[torch.Tensor]] = {}
        for stage in self._stages:
            # Each loss is its microbatch's share of the step's.
            # They are added in the order of microbatches, whatever order the schedule ran them in, as the bits depend on it.
            if losses := [loss for _, loss in sorted(stage.losses.items())]:
                results["loss", ""] = sum(losses[1:], losses[0])
            for fqn, gradient in stage.gradients.items():
                each.setdefault(fqn, []).append(gradient)
        # A tied parameter has several gradients here, in the order of stages, as the inputs of ``ties`` have them; the graph's
        # sum takes the place of the first.
        results |= {("grad", fqn): gradients[0] for fqn, gradients in each.items()}
        if TIES in self._described:
            results |= by_key(self._run(TIES, lambda value: each[value.fqn].pop(0)))
        return results

    def run_graph(self, phase: str, graph: fx.GraphModule, microbatch: int | None, given: Sequence[Any]) -> list[Any]:
        """Results of the graph ``phase``."""
        return self.call(phase, graph, *given)

    def _run_of_stage(
        self, stage: int, work: Work, microbatch: int | None, of: Callable[[Value], Any]
    ) -> list[tuple[Value, Any]]:
        phase = phase_of(stage, work)
        return self._run(phase, of, microbatch) if phase in self._described else []

    def _run(self, phase: str, of: Callable[[Value], Any], microbatch: int | None = None) -> list[tuple[Value, Any]]:
        mark(f"{phase}{'' if microbatch is None else f' of microbatch {microbatch}'} {self._step}")
        one = self._described[phase]
        self._ran[phase, microbatch] += 1
        made = self.run_graph(phase, self._graphs[phase], microbatch, [of(value) for value in one.inputs])
        return list(zip(one.outputs, made, strict=True))

    def _sums(self, stage: int) -> dict[str, Value]:
        """The gradients that ``stage`` sums, as they are reduced, by FQN."""
        phase = phase_of(stage, "reduce")
        return {value.fqn: value for value in self._described[phase].inputs} if phase in self._described else {}
