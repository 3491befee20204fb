"""What a rank holds while each graph of a step runs: what no graph frees, and what goes from one graph to a later one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from pytest_fxbucket.cost.memory import Liveness, Storage, liveness_of
from pytest_fxbucket.simulate.runs import Held, Runs

if TYPE_CHECKING:
    from pytest_fxbucket.step.roles import Phase, StepGraph


def memory_of(step: StepGraph, rounding: int = 1) -> dict[Phase, Liveness]:
    """All that lives on ``step``'s rank while each of its graphs runs: of one that runs several times, when most is held.

    Parameters, buffers, state and batch live throughout, in graphs that do not take them as well. What a graph gives lives to
    the end of the step, or of the last graph that reads it; where work crosses iterations (set-up, steady, clean-up) only what
    is carried outlives its call, and it lives until the call that takes it is over. A rank of pipeline stages follows the table
    of its schedule: it gathers parameters once, and keeps what it received and made of each microbatch to the end of the step,
    but for the gradients, which it sums.
    """
    alone = {
        phase: liveness_of(module.graph, step.inputs[phase], step.outputs[phase], rounding)
        for phase, module in step.graphs.items()
    }
    runs = Runs(step, alone)
    if step.pipelined is None:
        held = [*runs.kept(), *runs.in_turn()]
    else:
        from pytest_fxbucket.simulate.runs_of_stages import run_stages  # torch's schedules take a second to import

        held = [*runs.kept(), *run_stages(runs, step.pipelined, rounding)]
    live = _totals(held, len(runs.phases))
    found: dict[Phase, Liveness] = {}
    for phase, one in alone.items():
        at = max((number for number, run in enumerate(runs.phases) if run == phase), key=live.__getitem__, default=None)
        found[phase] = one if at is None else _with(one, [each.storage for each in held if each.after < at <= each.until])
    return found


def _totals(held: Sequence[Held], runs: int) -> list[int]:
    """Bytes that are held in each run."""
    change = [0] * (runs + 1)
    for one in held:
        change[one.after + 1] += one.storage.bytes
        change[min(one.until, runs - 1) + 1] -= one.storage.bytes
    return list(accumulate(change))[:-1]


def _with(alone: Liveness, held: Sequence[Storage]) -> Liveness:
    """``alone`` with ``held`` in the place of its inputs."""
    end = len(alone.at) - 1
    more = sum(one.bytes for one in held) - sum(one.bytes for one in alone.storages if one.first < 0)
    made = [one for one in alone.storages if one.first >= 0]
    kept = [replace(one, first=-1, last=end) for one in held]
    return replace(alone, storages=(*kept, *made), at=tuple([live + more for live in alone.at]))
