"""The check ``overlap``: is communication hidden by compute, in the step simulated on the plan's cluster?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.context import looked_at
from pytest_fxbucket.checks.verdict import Verdict, capped, failed, passed, said_in_blocks
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.simulate.of_plan import NamedFlight, SimulatedRank, in_schedule, simulated_ranks
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.plan.cluster import ExposureLimit

_MOST = 5
"""How many buckets are named below a broken limit."""
_TO_DO = {
    "too little compute": "more compute in front of its wait, or fewer bytes",
    "waited for too early": "defer_reduce = true, or wait_before by hand with an entry whose compute comes later",
    "behind another launch": 'smaller buckets before it, or [overlap] gather_group = "own", where gathers wait for reductions',
    "launched too late": "a larger [overlap] prefetch, or launch_at by hand",
    "memory": "less that lives there: smaller buckets, reshard_after_forward = true, checkpoints",
}


def run(context: Context) -> Verdict:
    """Hold the simulated step of every distinct rank against the limits."""
    limits, cluster = context.plan.checks.overlap, cluster_of(context.plan)
    assert limits  # the plan has it on, and then has a cluster too
    assert cluster is not None
    found = simulated_ranks(context.world, cluster)
    lines = [*idle(found, limits.limits()), *said_in_blocks((r.ranks, list(problems(r, limits.limits()))) for r in found)]
    most = max(found, key=lambda one: _exposed(one.flights))
    line, scheduled = most.timeline, in_schedule(context.world, cluster)
    hidden = f"{line.hidden} of {counted(len(line.flights), 'launch')} hidden"
    seconds = scheduled.seconds if scheduled else line.seconds
    summary = f"{_ms(_exposed(most.flights))} of {_ms(seconds)} ms exposed, {hidden}, on {cluster.name}"
    if lines:
        return failed("overlap", summary, [*capped(lines), *_advice(found)])
    return passed("overlap", f"{summary}; {looked_at(context.world)}")


def idle(found: Sequence[SimulatedRank], limits: Mapping[str, ExposureLimit]) -> Iterator[str]:
    """Sentences on limits, by direction, that hold nothing: no rank launches anything there."""
    launched = {direction for rank in found for one in rank.flights for direction in ("", one.direction)}
    for direction in limits:
        if direction not in launched:
            what = f"in {direction}, so checks.overlap.{direction}" if direction else "in the step, so checks.overlap"
            yield f"no rank launches anything {what} holds nothing; leave it out"


def problems(found: SimulatedRank, limits: Mapping[str, ExposureLimit]) -> Iterator[str]:
    """Sentences on limits that are broken, and the most exposed buckets; ``limits`` by direction, '' for all of them."""
    for direction, limit in limits.items():
        flights = [one for one in found.flights if direction in ("", one.direction)]
        of, key = (f"{direction}: ", f"{direction}.") if direction else ("", "")
        exposed = _exposed(flights)
        hidden = sum(one.flight.is_hidden for one in flights)
        broken = False
        if limit.exposed_max_ms is not None and exposed * 1000 > limit.exposed_max_ms:
            yield f"{of}{_ms(exposed)} ms exposed, at most {limit.exposed_max_ms:g} by checks.overlap.{key}exposed_max_ms"
            broken = True
        if limit.hidden_min is not None and hidden < limit.hidden_min * len(flights):
            yield (
                f"{of}{hidden} of {counted(len(flights), 'launch')} hidden, at least {100 * limit.hidden_min:g} % by "
                f"checks.overlap.{key}hidden_min"
            )
            broken = True
        if broken:
            yield from (f"  {one.name}: {one.exposed_clause}" for one in worst(flights)[:_MOST])


def worst(flights: Sequence[NamedFlight]) -> list[NamedFlight]:
    """The flights that are exposed, the most exposed first."""
    exposed = [one for one in flights if not one.flight.is_hidden]
    return sorted(exposed, key=lambda one: (-_exposed([one]), one.flight.start))


def _exposed(flights: Sequence[NamedFlight]) -> float:
    """Exposed seconds in a whole step: a pipeline stage runs some graphs several times, once for each microbatch."""
    return sum(one.flight.exposed * one.flight.times for one in flights)


def _advice(found: Sequence[SimulatedRank]) -> Iterator[str]:
    """A sentence with advice on the reason for which most is exposed."""
    seconds: dict[str, float] = {}
    for rank in found:
        for one in rank.flights:
            seconds[one.flight.why] = seconds.get(one.flight.why, 0.0) + _exposed([one])
    if reasons := [why for why in _TO_DO if seconds.get(why)]:
        why = max(reasons, key=lambda one: seconds[one])
        yield f"what exposes most is {why}; what helps: {_TO_DO[why]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f}"
