"""Puts a graph in the order that a schedule finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.cost.memory import StorageNeeds
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.passes.arrange import relink
from pytest_fxbucket.passes.auto.bucketing import HidingBefore
from pytest_fxbucket.passes.auto.schedule import kept_as_it_is, scheduled
from pytest_fxbucket.passes.report import ReorderReport

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.auto.estimates import Estimates
    from pytest_fxbucket.plan.schema_bucket import Overlap

SCHEDULED = "fxbucket_scheduled"
"""Mark of a launch whose place was found already: where all are so marked, a second run moves nothing."""


def peak_of(graph: fx.Graph, rules: Overlap, estimates: Estimates | None) -> int | None:
    """Most bytes that live at once in ``graph``, from which limits of memory count; None if ``rules`` have no such limit."""
    if estimates is None or (rules.max_memory_increase is None and rules.max_memory_increase_gb is None):
        return None
    return StorageNeeds(graph, estimates.cluster.rounding).peak(range(len(graph.nodes)))


def reorder_by_itself(graph: fx.Graph, rules: Overlap, estimates: Estimates | None, before: int | None) -> ReorderReport:
    """Put ``graph`` in the order with the least exposed time; ``before``: bytes that its limits of memory count from.

    Raises :class:`PlanError` without ``estimates``, and for limits that cannot be kept.
    """
    estimates = _required(estimates)
    launches = [node for node in graph.nodes if launch_kind(node) is not None]
    if all(launch.meta.get(SCHEDULED) for launch in launches):
        return ReorderReport((), kept_as_it_is(graph, estimates) if rules.insert_overlap_deps else ())
    found = scheduled(graph, estimates, rules, before)
    if found.order is not None:
        relink(graph, found.order)
    for launch in launches:
        launch.meta[SCHEDULED] = True
    return ReorderReport((), found.kept, found.came_to)


def hiding_of(order: Order, rules: Overlap, estimates: Estimates | None) -> HidingBefore:
    """What collectives hide behind, for merging them. Raises :class:`PlanError` without ``estimates``."""
    return HidingBefore(order, _required(estimates), rules)


def _required(estimates: Estimates | None) -> Estimates:
    if estimates is None:
        raise PlanError('[overlap] schedule = "auto" goes by seconds on a cluster, and nobody gave any')
    return estimates
