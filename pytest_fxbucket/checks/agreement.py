"""Do the ranks agree behind each transformation? Names the first behind which they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.calls import joint_problems
from pytest_fxbucket.transforms.traits import BUCKET

if TYPE_CHECKING:
    from pytest_fxbucket.plan_on_mesh import Passed, PlanOnMesh, RankPipeline
    from pytest_fxbucket.step.roles import Phase
    from pytest_fxbucket.transforms.fit import Looked

    _Stage = tuple[str, Mapping[int, Mapping[Phase, "Passed | Looked"]]]
    """Name, and by rank what was seen of each graph behind it."""


def disagreements(world: PlanOnMesh) -> list[str]:
    """What would hang across the ranks that are looked at: behind the first transformation, or the pass, where that is so.

    Without transformations just what is wrong behind the pass.
    """
    ways: dict[int, RankPipeline] = {rank: world.way(rank) for rank in world.ranks()}
    first = next(iter(ways.values()))
    stages: list[_Stage] = [
        (one.name, {rank: way.before[n].looked for rank, way in ways.items()}) for n, one in enumerate(first.before)
    ]
    passed: _Stage = (BUCKET, {rank: way.passed for rank, way in ways.items()})
    after: list[_Stage] = [
        (one.name, {rank: way.after[n].looked for rank, way in ways.items()}) for n, one in enumerate(first.after)
    ]
    for name, graphs in (*stages, passed, *after):
        if odd := next((rank for rank, one in graphs.items() if set(one) != set(graphs[0])), None):
            return [f"behind {name}: rank 0 has graphs {', '.join(graphs[0])}, rank {odd} {', '.join(graphs[odd])}"]
        lines = [
            line for phase in graphs[0] for line in joint_problems({rank: one[phase].calls for rank, one in graphs.items()})
        ]
        if lines:
            return [f"behind {name}: {line}" for line in lines] if stages or after else lines
    return []
