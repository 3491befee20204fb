"""Real ranks, which are processes over gloo: do two graphs leave the same bits there, and does a find show there too?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import fx

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.errors import FxbucketError, PassError, text_of
from pytest_fxbucket.fuzz.finds import HANG, RAISED, VALUES
from pytest_fxbucket.fuzz.inputs_and_outputs import graph_inputs
from pytest_fxbucket.fuzz.judge import made_of
from pytest_fxbucket.fuzz.program import Groups
from pytest_fxbucket.fuzz.rank_job import FuzzCase
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import encode, encode_module

if TYPE_CHECKING:
    from pytest_fxbucket.fuzz.finds import Find
    from pytest_fxbucket.fuzz.trial import Trial
    from pytest_fxbucket.fuzz.tried_pass import TriedPass

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
    case = FuzzCase(
        encode_module(before), portable, tuple(graph_inputs(before)), seed, named_groups(groups or {}, before, *after)
    )
    results = pools.get(world).run(JOB, [case] * world, timeout_s=LIMIT_S, what="graphs before and after a pass")
    said = cast("list[list[list[str]]]", results)
    return [[text for result in said for text in result[number]] for number in range(len(after))]


def named_groups(groups: Groups, *graph_modules: fx.GraphModule) -> Groups:
    """Those of ``groups`` that a launch in the graphs is on, or whose twin a launch is on."""
    launches = [collectives.read_launch(node) for one in graph_modules for node in one.graph.nodes]
    names = {untwinned(launch.group) for launch in launches if launch is not None}
    return {name: lists for name, lists in groups.items() if name in names}


HANG_S = 20.0
"""Ranks that have not answered after so many seconds are said to hang."""


def on_real_ranks(pools: Pools, trial: Trial, find: Find, subject: TriedPass) -> str:
    """What ranks over gloo say of ``find``, a sentence; empty where it is nothing that ranks could tell."""
    # Ranks cannot tell what the pass itself raises, whether it keeps the plan, or what it does a second time.
    if find.kind not in (HANG, VALUES) and not (find.kind == RAISED and "what it made raises" in find.says):
        return ""
    world, before = trial.program.world, trial.before
    try:
        made = made_of(trial, subject)
        groups = named_groups(trial.program.groups, before, *made.after)
        cases = [
            FuzzCase(encode_module(before), (encode(one.graph, one, subject.modules),), tuple(graph_inputs(before)), 0, groups)
            for one in made.after
        ]
    except PassError as error:
        return f"ranks cannot be sent what it made: {error}"
    try:
        results = pools.get(world).run(JOB, cases, timeout_s=HANG_S, what="what the pass made of a drawn program")
    except FxbucketError as error:
        return f"{world} gloo ranks: {text_of(error)[:300]}"
    texts = [text for result in cast("list[list[list[str]]]", results) for text in result[0]]
    return f"{world} gloo ranks: {texts[0]}" if texts else f"{world} gloo ranks leave the same bits: it depends on timing"
