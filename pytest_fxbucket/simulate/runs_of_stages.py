"""What a rank of pipeline stages holds from graph to graph, by the table of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fxbucket.cost.memory import Storage
from pytest_fxbucket.pipeline.schedules import leaves, table_of
from pytest_fxbucket.simulate.runs import END, Held, Runs
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.pipelined import TIES, UPDATE, Crossing, Pipelined, Work, phase_of

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.schedules import Action


def run_stages(runs: Runs, how: Pipelined, rounding: int) -> list[Held]:
    """Run all graphs of the rank in the table's order, then ties and the update; gives what they and transfers bring."""
    table = table_of(how.schedule, how.stages, max(how.places) + 1, how.microbatches)
    stages = _Stages(runs, how, rounding)
    for action in leaves(table.ranks[Mesh(runs.step.mesh).at(runs.step.rank, "pp")]):
        stages.do(action)
    return [*stages.found, *runs.run(TIES), *runs.run(UPDATE)]


class _Stages:
    """One rank's stages while the table is followed."""

    def __init__(self, runs: Runs, how: Pipelined, rounding: int) -> None:
        self._runs, self._how, self._rounding = runs, how, rounding
        self.found: list[Held] = []
        self._gathered: set[int] = set()
        self._unsummed: dict[int, dict[int, list[Held]]] = {}
        """By stage and microbatch gradients that are not summed yet."""
        self._done: set[tuple[int, int]] = set()
        """Stages and microbatches whose gradients are all there."""
        self._summed: dict[int, int] = {}
        """By stage how many microbatches are summed."""

    def do(self, action: Action) -> None:
        """Follow one action."""
        stage, microbatch, how = action.stage, action.microbatch or 0, self._how
        if action.kind in ("UNSHARD", "F") and stage not in self._gathered:
            self._gathered.add(stage)
            self.found += self._runs.run(phase_of(stage, "unshard"))
        if action.kind == "F":
            self._receive(how.forward[stage - 1] if stage else (), stage, ("forward",))
            self._compute(stage, "forward", microbatch)
        if action.kind in ("B", "I"):
            self._receive(how.backward[stage] if stage + 1 < how.stages else (), stage, ("backward", "input"))
            self._compute(stage, "backward", microbatch)
            self._compute(stage, "input", microbatch)
        if action.kind in ("B", "W"):
            self._compute(stage, "weight", microbatch)
            self._sum(stage, microbatch)
        if action.kind == "REDUCE_GRAD":
            self.found += self._runs.run(phase_of(stage, "reduce"))

    def _receive(self, flow: Sequence[Crossing], stage: int, works: Sequence[Work]) -> None:
        """Memory for what comes from another stage, there before the next run; from one of this rank a copy does."""
        runs = self._runs
        for phase in (phase for work in works if (phase := phase_of(stage, work)) in runs.alone):
            values = {value.fqn: value for value in runs.step.inputs[phase]}
            node = next(iter(runs.step.graphs[phase].graph.nodes))
            for one in flow:
                span = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.strides, strict=True))
                size = -(-span * one.dtype.itemsize // self._rounding) * self._rounding if one.bytes else 0
                self.found.append(Held(Storage(size, -1, -1, node, node, values.get(one.name)), len(runs.phases) - 1, END))

    def _compute(self, stage: int, work: Work, microbatch: int) -> None:
        for one in self._runs.run(phase_of(stage, work)):
            value = one.storage.value
            if value is not None and value.role == "unreduced":
                self._unsummed.setdefault(stage, {}).setdefault(microbatch, []).append(one)
            else:
                self.found.append(one)

    def _sum(self, stage: int, microbatch: int) -> None:
        """Gradients are added up in the order of microbatches: those of the first become the sums, others end then."""
        self._done.add((stage, microbatch))
        now, waiting = len(self._runs.phases) - 1, self._unsummed.get(stage, {})
        while (stage, number := self._summed.get(stage, 0)) in self._done:
            for one in waiting.pop(number, []):
                self.found.append(replace(one, until=now))
                if not number:
                    self.found.append(Held(self._total(one, stage), now, END))
            self._summed[stage] = number + 1

    def _total(self, one: Held, stage: int) -> Storage:
        """The sum that the gradient ``one`` begins, as it is reduced."""
        reduced = {value.fqn: value for value in self._runs.step.inputs.get(phase_of(stage, "reduce"), ())}
        value = one.storage.value
        summed = reduced.get(value.fqn) if value is not None else None
        if value is None or summed is None or not (value.dtype and summed.dtype):
            return one.storage
        return replace(one.storage, bytes=one.storage.bytes * summed.dtype.itemsize // value.dtype.itemsize)
