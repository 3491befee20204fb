"""Legal variations of a plan's graphs: no check of values or of hangs may be red, whatever audit says of promises."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.mutate.mutant import Spoil
from pytest_fxbucket.passes.arrange import arranged, relink
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.passes.registry import Bucketed
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.step.roles import Phase

ORDERS = 3


class Variation(NamedTuple):
    """Another graph of the same program."""

    name: str
    spoil: Spoil


def variations(world: PlanOnMesh) -> Iterator[Variation]:
    """Unbucketed, the other layout, deeper prefetch, no deferral, and random orders."""
    for name, plan in _plans(world.plan):
        other = world.under(plan)
        for rank in range(world.size):  # with process groups of its own
            other.versions(rank)
        yield Variation(name, partial(_as_planned, other))
    for seed in range(ORDERS):
        yield Variation(f"random order {seed}", partial(_at_random, seed))


def _plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    bucket, overlap = plan.bucket, plan.overlap
    yield "unbucketed", replace(plan, bucket=replace(bucket, enabled=False))
    other = "execution" if bucket.layout == "registration" else "registration"
    yield f"{other} layout", replace(plan, bucket=replace(bucket, layout=other))
    if overlap.schedule == "manual":
        yield "prefetch 3", replace(plan, overlap=replace(overlap, prefetch=3))
        yield "no deferral", replace(plan, overlap=replace(overlap, defer_reduce=not overlap.defer_reduce))


def _as_planned(other: PlanOnMesh, rank: int, phase: Phase, bucketed: Bucketed) -> Bucketed:
    return other.passed(rank)[phase].bucketed


def _at_random(seed: int, rank: int, phase: Phase, bucketed: Bucketed) -> Bucketed:
    """The same nodes in an order that all ranks take: a launch may stand anywhere that its inputs and readers allow."""
    graph = copy.deepcopy(without_kept_order(bucketed.graph))
    order = order_of(graph)
    draw = random.Random(f"{seed} {phase}")
    spread = len(order.nodes) / 8
    wishes = [-1.0 if node.op == "placeholder" else at + draw.uniform(-spread, spread) for at, node in enumerate(order.nodes)]
    wishes[-1] = 2.0 * len(wishes)
    relink(graph, [order.nodes[index] for index in arranged(dict(enumerate(order.before)), wishes)])
    return Bucketed(graph, bucketed.root, None, bucketed.modules)
