"""A graph before and after a pass on real ranks: are all outputs, and all inputs as it leaves them, the same bit for bit?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import fx

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.fuzz.groups import Groups
from pytest_fxbucket.fuzz.inputs import given
from pytest_fxbucket.fuzz.rank_job import Case
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import encode_module

JOB = "pytest_fxbucket.fuzz.rank_job:compare"
LIMIT_S = 60.0


def compare(
    pools: Pools,
    before: fx.GraphModule,
    after: fx.GraphModule,
    world: int,
    seed: int = 0,
    groups: Groups | None = None,
) -> list[str]:
    """What differs between ``before`` and ``after`` on any of ``world`` gloo ranks, a sentence each; none if they are equal.

    Each rank makes inputs of its own from the placeholders' fake values: small integers, held in the placeholder's dtype, so
    that sums are exact. Reductions add in rank order. ``groups`` are those that the graphs name besides ``"0"``, the world.
    """
    return compare_all(pools, before, [after], world, seed, groups)[0]


def compare_all(
    pools: Pools,
    before: fx.GraphModule,
    after: Sequence[fx.GraphModule],
    world: int,
    seed: int = 0,
    groups: Groups | None = None,
) -> list[list[str]]:
    """As :func:`compare`, for several graphs that passes made of one."""
    portable = tuple(encode_module(one) for one in after)
    case = Case(encode_module(before), portable, tuple(given(before)), seed, named_groups(groups or {}, before, *after))
    results = pools.get(world).run(JOB, [case] * world, timeout_s=LIMIT_S, what="graphs before and after a pass")
    said = cast("list[list[list[str]]]", results)
    return [[text for result in said for text in result[number]] for number in range(len(after))]


def named_groups(groups: Groups, *graph_modules: fx.GraphModule) -> Groups:
    """Those of ``groups`` that the graphs name, or whose twins."""
    launches = [collectives.read_launch(node) for one in graph_modules for node in one.graph.nodes]
    names = {untwinned(launch.group) for launch in launches if launch is not None}
    return {name: lists for name, lists in groups.items() if name in names}
