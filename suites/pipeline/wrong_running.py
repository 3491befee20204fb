"""The job of bitwise with one fault each in how ranks run their stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from pytest_fxbucket.checks.bitwise.job import BitwiseOutcome, BitwiseTask, run
from pytest_fxbucket.pipeline import running
from pytest_fxbucket.pipeline.rank_stage import RunnableStage

Job = Callable[[int, int, BitwiseTask], BitwiseOutcome]


def instead_of(cls: Any, name: str) -> Callable[[Callable[..., Any]], Job]:
    """The job with a method, or a function of a module, replaced by one that is given the real one first."""

    def made(wrong: Callable[..., Any]) -> Job:
        def job(rank: int, world: int, task: BitwiseTask) -> BitwiseOutcome:
            real = getattr(cls, name)
            with patch.object(cls, name, lambda *args, **kwargs: wrong(real, *args, **kwargs)):
                return run(rank, world, task)

        return job

    return made


@instead_of(RunnableStage, "forward_one_chunk")
def microbatch_run_twice(real: Any, self: RunnableStage, number: int, *args: Any, **kwargs: Any) -> Any:
    if (self.stage_index, number) == (1, 1):
        real(self, number, *args, **kwargs)
    return real(self, number, *args, **kwargs)


@instead_of(RunnableStage, "_rest_of_backward")
def gradients_added_last_first(_: Any, self: RunnableStage, number: int) -> None:
    self._compute("weight", number)
    self._summed += 1
    if self._summed == len(self._rows):
        for made in reversed(self._made.values()):
            for fqn, gradient in made.items():
                self.totals[fqn] = self.totals[fqn] + gradient if fqn in self.totals else gradient


@instead_of(RunnableStage, "backward_one_chunk")
def reduced_behind_the_first_microbatch(real: Any, self: RunnableStage, number: int, *args: Any, **kwargs: Any) -> None:
    real(self, number, *args, **kwargs)
    if (self.stage_index, number) == (2, 0):
        self.perform_reduce_grad()


@instead_of(RunnableStage, "_value")
def labels_of_another_microbatch(real: Any, self: RunnableStage, name: str, number: int) -> Any:
    return real(self, name, 0 if self.is_last and name == "[0]" else number)


@instead_of(RunnableStage, "_named")
def sent_in_another_layout(real: Any, self: RunnableStage, *args: Any) -> Any:
    found = real(self, *args)
    if self.is_first:
        return tuple(one.transpose(0, 1).contiguous().transpose(0, 1) if one.dim() > 2 else one for one in found)
    return found


@instead_of(RunnableStage, "_named")
def swapped_when_sent(real: Any, self: RunnableStage, number: int, flow: Any) -> Any:
    """Both have one shape."""
    found = real(self, number, flow)
    swaps = self.is_first and len(found) == 4
    return (found[0], found[2], found[1], found[3]) if swaps else found


@instead_of(RunnableStage, "unshard")
def gathered_for_each_microbatch(real: Any, self: RunnableStage) -> None:
    self._whole = None
    real(self)


@instead_of(running, "schedule_on_ranks")
def another_schedule(real: Any, name: str, *args: Any) -> Any:
    assert name == "1F1B"
    return real("GPipe", *args)
