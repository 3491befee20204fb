"""The runs of a step's graphs, in order, and what of each lives on behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_fxbucket.cost.memory import Liveness, Storage
from pytest_fxbucket.step.iterations import CROSSING
from pytest_fxbucket.step.pipelined import stage_of
from pytest_fxbucket.step.roles import WITHIN

if TYPE_CHECKING:
    from pytest_fxbucket.step.roles import Phase, StepGraph, Value


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A storage that lives between graphs."""

    storage: Storage
    after: int
    """Number of the run that makes it; -1 of what is there before the first."""
    until: int
    """Number of the last run in which it lives."""


END = 1 << 60
"""Behind all runs."""


class Runs:
    """Goes through the runs of a step's graphs, in order."""

    def __init__(self, step: StepGraph, alone: Mapping[Phase, Liveness]) -> None:
        self.step, self.alone = step, alone
        self.phases: list[Phase] = []
        """The graph of each run."""

    def run(self, phase: Phase, until: int = END) -> list[Held]:
        """Run ``phase`` next, if there is such a graph; what it gives lives until the run ``until``."""
        if phase not in self.alone:
            return []
        self.phases.append(phase)
        made = dict.fromkeys(one for storages in self.alone[phase].outputs for one in storages if one.first >= 0)
        return [Held(one, len(self.phases) - 1, until) for one in made]

    def in_turn(self) -> Iterator[Held]:
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
            last = later if _key(value) in map(_key, self.step.inputs[phase]) else last
            if _key(value) in map(_key, self.step.outputs[phase]):
                break
        return last

    def kept(self) -> Iterator[Held]:
        """What is there before: inputs that no graph before makes, each once, and attributes. Stages receive theirs."""
        there: set[object] = set()
        for phase in self.step.graphs:
            alone = self.alone[phase]
            mine: set[Storage] = set()
            for value, storages in zip(self.step.inputs[phase], alone.inputs, strict=True):
                key = _key(value) if value.role != "value" else (phase, value.fqn)
                if key in there or (value.role in WITHIN and self.step.pipelined is not None):
                    mine.update(storages)
                    continue
                there.add(key)
                for storage in storages:
                    if storage not in mine:
                        mine.add(storage)
                        yield Held(self._whole(storage, phase, value), -1, END)
            attributes = (one for one in alone.storages if one.maker.op == "get_attr")
            yield from (Held(one, -1, END) for one in attributes)
            there.update(_key(value) for value in self.step.outputs[phase])

    def _whole(self, storage: Storage, phase: Phase, value: Value) -> Storage:
        """``storage``; of the rows of one microbatch the whole batch."""
        how = self.step.pipelined
        if how is None or value.role != "batch" or stage_of(phase) is None:
            return storage
        return replace(storage, bytes=storage.bytes * how.microbatches)


def _key(value: Value) -> tuple[str, str]:
    return value.role, value.fqn
