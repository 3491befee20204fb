"""The check ``collectives``: could the step hang, or could ranks mix up what they send each other?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.context import disagreements, looked_at, schedule_problems
from pytest_fxbucket.checks.verdict import Verdict, capped, failed, passed, said_once
from pytest_fxbucket.graph.pairing import mixed_launches
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh


def run(context: Context) -> Verdict:
    """Look at each rank's launches and waits, and at all ranks' together."""
    world = context.world
    several, first = world.distinct(), world.final(0)
    lines = said_once((ranks, [p for one in graphs.values() for p in one.problems]) for ranks, graphs in several)
    # Ranks that do not launch the same collectives hang first: whose bytes would be mixed is asked only if they all do.
    lines += disagreements(world) or list(_mixed(world))
    lines += schedule_problems(world)
    launches = sum(not call.is_wait for one in first.values() for call in one.calls)
    scheduled = f", and {world.plan.pipeline.schedule} sends and receives in one order" if world.plan.pipeline else ""
    if lines:
        return failed("collectives", f"{counted(len(lines), 'problem')} that would hang or race", capped(lines))
    return passed("collectives", f"{launches} launches agree on {looked_at(world)}{scheduled}")


def _mixed(world: PlanOnMesh) -> Iterator[str]:
    graphs = {rank: world.final(rank) for rank in world.ranks()}
    for phase in dict.fromkeys(phase for one in graphs.values() for phase in one):
        yield from mixed_launches({r: (one[phase].reading, one[phase].members) for r, one in graphs.items() if phase in one})
