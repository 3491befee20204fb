"""The check ``memory``: does the step, simulated on the plan's cluster, stay within the plan's limits of peak memory?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.context import looked_at
from pytest_fxbucket.checks.verdict import Verdict, capped, failed, passed, said_in_blocks
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.simulate.of_plan import SimulatedRank, simulated_ranks, unbucketed

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.plan.cluster import MemoryLimits
    from pytest_fxbucket.simulate.timeline import Timeline

_MOST, _MOST_BUCKETS = 8, 4
"""How many kinds and modules, and how many buckets, are named below a broken limit."""


def run(context: Context) -> Verdict:
    """Hold the peak of every distinct rank against the limits."""
    limits, cluster = context.plan.checks.memory, cluster_of(context.plan)
    assert limits  # the plan has it on, and then has a cluster too
    assert cluster is not None
    found = simulated_ranks(context.world, cluster)
    before = {one.ranks: unbucketed(context.world, one.ranks[0], cluster) for one in found}
    lines = said_in_blocks((one.ranks, list(problems(one, before[one.ranks], limits))) for one in found)
    fattest = max(found, key=lambda one: one.timeline.peak_bytes)
    peak, of = fattest.timeline.peak_bytes, before[fattest.ranks].peak_bytes
    summary = f"peak {_gb(peak)} GB, unbucketed {_gb(of)} GB, of {_gb(int(cluster.memory))} GB on {cluster.name}"
    if lines:
        return failed("memory", summary, capped(lines))
    return passed("memory", f"{summary}; {looked_at(context.world)}")


def problems(found: SimulatedRank, before: Timeline, limits: MemoryLimits) -> Iterator[str]:
    """Sentences on limits that are broken, then what is alive at the peak, and the buckets with the largest buffers there."""
    line = found.timeline
    where = f"at {line.peak_node} of {line.peak_phase}"
    said = []
    if limits.peak_max_gb is not None and line.peak_bytes > limits.peak_max_gb * 2**30:
        said.append(f"peak {_gb(line.peak_bytes)} GB {where}, at most {limits.peak_max_gb:g} by checks.memory.peak_max_gb")
    if limits.increase_max is not None and line.peak_bytes > (1 + limits.increase_max) * before.peak_bytes:
        more = 100 * (line.peak_bytes / before.peak_bytes - 1)
        said.append(
            f"peak {_gb(line.peak_bytes)} GB {where}, {more:.1f} % above the unbucketed step's {_gb(before.peak_bytes)} GB, at "
            f"most {100 * limits.increase_max:g} % by checks.memory.increase_max"
        )
    if not said:
        return
    yield from said
    for one in line.living[:_MOST]:
        yield f"  {one.kind}{f' of {one.module}' if one.module else ''}: {_gb(one.bytes)} GB"
    names = {one.flight.node: one.name for one in found.flights if one.flight.phase == line.peak_phase}
    for node, size in list(line.buffers.items())[:_MOST_BUCKETS]:
        yield f"  bucket {names.get(node, node)}: {_gb(size)} GB of what it sends and brings"


def _gb(size: int) -> str:
    """``size`` in units of 2**30 bytes, with more digits for small plans."""
    return f"{size / 2**30:.6f}" if size < 2**26 else f"{size / 2**30:.2f}"
