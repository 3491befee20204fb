"""Simulates a step in pipeline stages: each rank's graphs on their own, and the schedule that orders them, with its bubbles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_fxbucket.cost.costs import transfer_seconds
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.pipeline.played import bubbles_of, done_by
from pytest_fxbucket.pipeline.schedules import BACKWARD, FORWARD, INPUT_GRADS, WEIGHT_GRADS, table_of
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.step.pipelined import TIES, UPDATE, Work, phase_of

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.cost.costs import CostModel
    from pytest_fxbucket.pipeline.played import TimedAction
    from pytest_fxbucket.pipeline.schedules import Action
    from pytest_fxbucket.simulate.timeline import Timeline
    from pytest_fxbucket.step.pipelined import Crossing, Pipelined
    from pytest_fxbucket.step.roles import Phase, StepGraph

WORK: Mapping[str, Work] = {FORWARD: "forward", BACKWARD: "backward", INPUT_GRADS: "input", WEIGHT_GRADS: "weight"}
_PARTS: Mapping[str, tuple[Work, ...]] = {BACKWARD: ("backward", "input", "weight")}
"""DualPipeV runs some backwards whole, of stages that are traced in two parts."""


@dataclass(frozen=True)
class StagedTimeline:
    """One step of all ranks along pp."""

    seconds: float
    """From the first gather to the end of the last update."""
    done: tuple[TimedAction, ...]
    """The computing actions of the schedule, rank by rank, in the order in which each rank does them."""
    bubbles: tuple[float, ...]
    """The share of the schedule's time, from 0 to 1, in which each rank computes nothing. That time is from the first action of
    any rank to the end of the last one."""
    phases: tuple[Mapping[Phase, Timeline], ...] = field(repr=False)
    """The graphs of each rank, each simulated on its own."""

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they compute nothing."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def exposed(self) -> float:
        """Seconds that waits block compute within graphs, each graph counted once, on the rank where they are most."""
        return max(sum(one.exposed for one in phases.values()) for phases in self.phases)


def simulate_stages(
    places: Sequence[StepGraph], cluster: Cluster, cost_of: Callable[[StepGraph], CostModel | None] = lambda step: None
) -> StagedTimeline:
    """Simulate a step in stages; ``places`` has the step of each rank along pp, ``cost_of`` gives its cost model.

    Each graph takes as long as :func:`simulate` says for it alone. A rank gathers the parameters of all its stages, follows the
    schedule, and reduces their gradients. Values between stages are sent in order over the link between their ranks, while
    these compute. Raises :class:`SimulationError` for a step without stages, and as :func:`simulate`.
    """
    how = next((one.pipelined for one in places), None)
    if how is None:
        raise SimulationError("the step has no pipeline stages, so no schedule orders it; simulate takes it as it is")
    phases = tuple({phase: _alone(step, phase, cluster, cost_of(step)) for phase in step.graphs} for step in places)
    seconds = [{phase: one.seconds for phase, one in each.items()} for each in phases]
    table = table_of(how.schedule, how.stages, len(places), how.microbatches)
    ranks = [step.rank for step in places]

    def takes(action: Action) -> float:
        works = _PARTS.get(action.kind, (WORK[action.kind],))
        return sum(seconds[action.rank].get(phase_of(action.stage, work), 0.0) for work in works)

    def crosses(sender: int, receiver: int) -> float:
        here, there = ranks[table.owners[sender]], ranks[table.owners[receiver]]
        sent = sum(one.bytes for one in _crossing(how, sender, receiver))
        return transfer_seconds(sent, here, there, cluster) if sent and here != there else 0.0

    # A rank runs in three parts: it gathers, follows the schedule, then reduces and updates. Only the schedule is interleaved
    # with other ranks, and only ties wait for all of them.
    begins = [sum(each.get(phase_of(stage, "unshard"), 0.0) for stage in range(how.stages)) for each in seconds]
    done = done_by(table, takes, crosses, begins)
    ends = [max((one.end for one in done if one.rank == rank), default=begins[rank]) for rank in range(table.pp)]
    reduced = [
        end + sum(each.get(phase_of(stage, "reduce"), 0.0) for stage in range(how.stages))
        for end, each in zip(ends, seconds, strict=True)
    ]
    # Gradients of parameters that several stages share are summed when the slowest rank has reduced.
    tied = [max(reduced) + each[TIES] if TIES in each else own for own, each in zip(reduced, seconds, strict=True)]
    ended = [own + each.get(UPDATE, 0.0) for own, each in zip(tied, seconds, strict=True)]
    return StagedTimeline(max(ended), tuple(done), bubbles_of(done, table.pp), phases)


def _alone(step: StepGraph, phase: Phase, cluster: Cluster, cost: CostModel | None) -> Timeline:
    return simulate(replace(step, graphs={phase: step.graphs[phase]}), cluster, cost)


def _crossing(how: Pipelined, sender: int, receiver: int) -> Sequence[Crossing]:
    return how.forward[sender] if receiver > sender else how.backward[receiver]
