"""Memory that a rank holds while each graph of a step runs, including storages that live longer than one graph.

These are storages that no graph frees, such as parameters, and values that one graph hands to a later one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from pytest_fxbucket.cost.memory import Liveness, Storage, liveness_of
from pytest_fxbucket.step.iterations import CROSSING
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.pipelined import TIES, UPDATE, Crossing, Pipelined, Work, phase_of, stage_of
from pytest_fxbucket.step.roles import WITHIN

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.schedules import Action
    from pytest_fxbucket.step.roles import Phase, StepGraph, Value


def memory_of(step: StepGraph, rounding: int = 1) -> dict[Phase, Liveness]:
    """All storages that live on ``step``'s rank while each of its graphs runs; for a graph that runs often, when most is held.

    Parameters, buffers, state and batch live throughout, also in graphs that do not take them. An output of a graph lives to
    the end of the step, or to the end of the last graph that reads it. Where work crosses iterations (set-up, steady, clean-up)
    only carried values outlive their call, and they live until the call that takes them is over. A rank of pipeline stages
    follows the table of its schedule: it gathers parameters once, and keeps all that it receives and makes for each microbatch
    to the end of the step, except for gradients, which it sums.
    """
    # Three steps: the liveness of each graph on its own; the runs of all graphs in order, with the storages that live between
    # them; then to each graph's own liveness those storages are added, at the run of it where they are most.
    alone = {
        phase: liveness_of(module.graph, step.inputs[phase], step.outputs[phase], rounding)
        for phase, module in step.graphs.items()
    }
    runs = GraphRuns(step, alone)
    if step.pipelined is None:
        held = [*runs.before_first_run(), *runs.in_turn()]
    else:
        held = [*runs.before_first_run(), *run_stages(runs, step.pipelined, rounding)]
    live = _totals(held, len(runs.phases))
    found: dict[Phase, Liveness] = {}
    for phase, one in alone.items():
        at = max((number for number, run in enumerate(runs.phases) if run == phase), key=live.__getitem__, default=None)
        # A graph that the schedule never runs is left with what is its own.
        found[phase] = one if at is None else _with(one, [each.storage for each in held if each.after < at <= each.until])
    return found


def _totals(held: Sequence[HeldStorage], runs: int) -> list[int]:
    """Bytes of ``held`` that live in each of ``runs`` runs."""
    change = [0] * (runs + 1)
    for one in held:
        # From the run behind its maker on: in the maker's run the graph's own liveness has it.
        change[one.after + 1] += one.storage.bytes
        change[min(one.until, runs - 1) + 1] -= one.storage.bytes
    return list(accumulate(change))[:-1]


def _with(alone: Liveness, held: Sequence[Storage]) -> Liveness:
    """The liveness ``alone`` with the storages ``held`` throughout, which replace the graph's own inputs."""
    end = len(alone.at) - 1
    more = sum(one.bytes for one in held) - sum(one.bytes for one in alone.storages if one.first < 0)
    made = [one for one in alone.storages if one.first >= 0]
    kept = [replace(one, first=-1, last=end) for one in held]
    return replace(alone, storages=(*kept, *made), at=tuple([live + more for live in alone.at]))


@dataclass(frozen=True, slots=True, eq=False)
class HeldStorage:
    """A storage that lives between graphs."""

    storage: Storage
    after: int
    """Number of the run that makes it; -1 if it is there before the first run."""
    until: int
    """Number of the last run in which it lives."""


END = 1 << 60
"""A run number behind all runs: the storage lives to the end of the step."""


class GraphRuns:
    """Goes through the runs of a step's graphs, in order."""

    def __init__(self, step: StepGraph, alone: Mapping[Phase, Liveness]) -> None:
        self.step, self.alone = step, alone
        self.phases: list[Phase] = []
        """The graph of each run."""

    def run(self, phase: Phase, until: int = END) -> list[HeldStorage]:
        """Run ``phase`` next, if there is such a graph; the outputs that it makes live until the run ``until``."""
        if phase not in self.alone:
            return []
        self.phases.append(phase)
        made = dict.fromkeys(one for storages in self.alone[phase].outputs for one in storages if one.first >= 0)
        return [HeldStorage(one, len(self.phases) - 1, until) for one in made]

    def in_turn(self) -> Iterator[HeldStorage]:
        """Each graph once, in the step's order."""
        step, phases = self.step, list(self.step.graphs)
        crosses = set(phases) <= set(CROSSING)
        for number, phase in enumerate(phases):
            until: dict[Storage, int] = {}
            for value, storages in zip(step.outputs[phase], self.alone[phase].outputs, strict=False):
                lives = self._last(value, phases, number) if value.role in WITHIN else number if crosses else END
                until |= {storage: max(until.get(storage, number), lives) for storage in storages}
            yield from (replace(one, until=until.get(one.storage, END)) for one in self.run(phase))

    def _last(self, value: Value, phases: Sequence[Phase], number: int) -> int:
        """The last run that takes ``value`` from the run ``number``."""
        last = number
        for later, phase in enumerate(phases[number + 1 :], number + 1):
            last = later if value.key in (one.key for one in self.step.inputs[phase]) else last
            # A later graph that gives the key, as steady does with what set-up carried, makes a new tensor of that name.
            if value.key in (one.key for one in self.step.outputs[phase]):
                break
        return last

    def before_first_run(self) -> Iterator[HeldStorage]:
        """Storages that are there before the first run: inputs that no earlier graph makes, each once, and graph attributes.

        Values that pipeline stages hand to each other are not among them: :meth:`_Stages._receive` makes memory for them.
        """
        there: set[object] = set()
        for phase in self.step.graphs:
            alone = self.alone[phase]
            mine: set[Storage] = set()
            for value, storages in zip(self.step.inputs[phase], alone.inputs, strict=True):
                # A key is one tensor in all graphs of a step, except for the role "value", whose FQN is a graph's own number.
                key = value.key if value.role != "value" else (phase, value.fqn)
                if key in there or (value.role in WITHIN and self.step.pipelined is not None):
                    mine.update(storages)
                    continue
                there.add(key)
                for storage in storages:
                    if storage not in mine:  # two inputs may be views of one storage
                        mine.add(storage)
                        yield HeldStorage(self._whole(storage, phase, value), -1, END)
            attributes = (one for one in alone.storages if one.maker.op == "get_attr")
            yield from (HeldStorage(one, -1, END) for one in attributes)
            there.update(value.key for value in self.step.outputs[phase])

    def _whole(self, storage: Storage, phase: Phase, value: Value) -> Storage:
        """``storage``; if it is a microbatch's part of the batch, the storage of the whole batch."""
        how = self.step.pipelined
        if how is None or value.role != "batch" or stage_of(phase) is None:
            return storage
        return replace(storage, bytes=storage.bytes * how.microbatches)


# By the table of a schedule.


def run_stages(runs: GraphRuns, how: Pipelined, rounding: int) -> list[HeldStorage]:
    """Run the rank's graphs in the table's order, then ties and the update; the storages that these and transfers leave."""
    from pytest_fxbucket.pipeline.schedules import leaves, table_of  # torch's schedules take a second to import

    table = table_of(how.schedule, how.stages, max(how.pp_places) + 1, how.microbatches)
    stages = _Stages(runs, how, rounding)
    for action in leaves(table.ranks[Mesh(runs.step.mesh).at(runs.step.rank, "pp")]):
        stages.do(action)
    return [*stages.found, *runs.run(TIES), *runs.run(UPDATE)]


class _Stages:
    """Follows one rank's actions in the schedule's table."""

    def __init__(self, runs: GraphRuns, how: Pipelined, rounding: int) -> None:
        self._runs, self._how, self._rounding = runs, how, rounding
        self.found: list[HeldStorage] = []
        self._gathered: set[int] = set()
        self._unsummed: dict[int, dict[int, list[HeldStorage]]] = {}
        """By stage and microbatch the gradients that are not summed yet."""
        self._done: set[tuple[int, int]] = set()
        """(stage, microbatch) whose gradients are all made."""
        self._summed: dict[int, int] = {}
        """By stage how many microbatches have been summed."""

    def do(self, action: Action) -> None:
        """Follow one action: B is a whole backward, I and W are its two halves (gradients of inputs, of weights)."""
        stage, microbatch, how = action.stage, action.microbatch or 0, self._how
        if action.kind in ("UNSHARD", "F") and stage not in self._gathered:
            self._gathered.add(stage)
            self.found += self._runs.run(phase_of(stage, "unshard"))
        if action.kind == "F":
            self._receive(how.forward[stage - 1] if stage else (), stage, ("forward",))
            self._compute(stage, "forward", microbatch)
        # A stage has a graph of the whole backward or of its two halves; a graph that it does not have takes no run.
        if action.kind in ("B", "I"):
            self._receive(how.backward[stage] if stage + 1 < how.stages else (), stage, ("backward", "input", "weight"))
            self._compute(stage, "backward", microbatch)
            self._compute(stage, "input", microbatch)
        if action.kind in ("B", "W"):
            self._compute(stage, "weight", microbatch)
            self._sum(stage, microbatch)
        if action.kind == "REDUCE_GRAD":
            self.found += self._runs.run(phase_of(stage, "reduce"))

    def _receive(self, flow: Sequence[Crossing], stage: int, works: Sequence[Work]) -> None:
        """Add memory for the values that another stage sends, also for a stage of the same rank, whose values are copied.

        It is there before the next run, for the first of ``works`` that the stage has: stage 0 has no gradients of inputs.
        """
        runs = self._runs
        for phase in [phase for work in works if (phase := phase_of(stage, work)) in runs.alone][:1]:
            values = {value.fqn: value for value in runs.step.inputs[phase]}
            node = next(iter(runs.step.graphs[phase].graph.nodes))
            for one in flow:
                # The elements from its first to its last in memory, gaps included; an empty tensor has none.
                span = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.strides, strict=True))
                size = -(-span * one.dtype.itemsize // self._rounding) * self._rounding if one.bytes else 0
                self.found.append(
                    HeldStorage(Storage(size, -1, -1, node, node, values.get(one.name)), len(runs.phases) - 1, END)
                )

    def _compute(self, stage: int, work: Work, microbatch: int) -> None:
        for one in self._runs.run(phase_of(stage, work)):
            value = one.storage.value
            if value is not None and value.role == "unreduced":
                self._unsummed.setdefault(stage, {}).setdefault(microbatch, []).append(one)
            else:
                self.found.append(one)

    def _sum(self, stage: int, microbatch: int) -> None:
        """Sum gradients in the order of microbatches: those of the first begin the sums, and each microbatch's own end then.

        A microbatch that is done out of turn waits for those before it, and its gradients live as long.
        """
        self._done.add((stage, microbatch))
        now, waiting = len(self._runs.phases) - 1, self._unsummed.get(stage, {})
        while (stage, number := self._summed.get(stage, 0)) in self._done:
            for one in waiting.pop(number, []):
                self.found.append(replace(one, until=now))
                if not number:
                    self.found.append(HeldStorage(self._total(one, stage), now, END))
            self._summed[stage] = number + 1

    def _total(self, one: HeldStorage, stage: int) -> Storage:
        """The storage of the sum that the gradient ``one`` begins, in the dtype that is reduced."""
        reduced = {value.fqn: value for value in self._runs.step.inputs.get(phase_of(stage, "reduce"), ())}
        value = one.storage.value
        summed = reduced.get(value.fqn) if value is not None else None
        if value is None or summed is None or not (value.dtype and summed.dtype):
            return one.storage
        return replace(one.storage, bytes=one.storage.bytes * summed.dtype.itemsize // value.dtype.itemsize)
