"""The drop-in for torch's automatic scheduler: overlap that is found by itself, with torch's keywords.

torch's is ``schedule_overlap_bucketing`` of ``torch._inductor.fx_passes.overlap_scheduling``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import fx

from pytest_fxbucket.cost.cluster import Cluster, cluster_named
from pytest_fxbucket.cost.costs import CostModel, Roofline, checked
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.passes.auto.estimates import Estimates, ranks_of_group, refuse_symbolic
from pytest_fxbucket.passes.keep_order import forget_order
from pytest_fxbucket.passes.manual import ManualPass, within_room
from pytest_fxbucket.passes.targets import by_size
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap
from pytest_fxbucket.process import collector
from pytest_fxbucket.words import nearest, one_or_other, show

if TYPE_CHECKING:
    from pytest_fxbucket.passes.report import PassReport

    Estimation = Callable[[fx.Node, int | None], float | None]

_PLAIN: dict[str, tuple[object, ...]] = {
    "collective_estimator": ("analytical", "benchmark"),
    "compute_estimator": ("analytical", "benchmark"),
    "bucket_mode": (None, "default", "custom_ops", "custom_ops_multidtype"),
    "bucket_only_internode_comms": (False,),
    "enable_fusion_regions": (False,),
    "pge_profile_path": (None,),
}
"""Values that a keyword of torch's may have here."""


def schedule_overlap_bucketing(
    gm: fx.GraphModule,
    max_in_flight_gb: float = 5,
    max_compute_pre_fetch: int = 200,
    collective_bucketing: bool = False,
    insert_overlap_deps: bool = False,
    compute_overlap_multipler: float = 1.0,
    max_coll_distance: int = 200,
    custom_runtime_estimation: Estimation | None = None,
    collective_estimator: Literal["analytical", "benchmark"] = "analytical",
    compute_estimator: Literal["analytical", "benchmark"] = "benchmark",
    max_memory_increase_gb: float | None = 1.0,
    max_memory_increase_ratio: float | None = 0.05,
    log_final_collectives_estimations: bool = False,
    bucket_exposed_first: bool | None = None,
    enable_fusion_regions: bool = False,
    bucket_only_internode_comms: bool = False,
    prioritize_bucketing_during_scheduling: bool = True,
    max_off_bucket_gb: float | None = 0.5,
    bucket_mode: str | None = None,
    pge_profile_path: str | None = None,
    pre_bucketing_fsdp_collectives: bool = True,
    pre_bucketing_fsdp_collectives_bucket_cap_mb: float | None = None,
    *,
    cluster: str | Cluster = "h100-sxm",
    report: Callable[[PassReport], object] | None = None,
) -> fx.GraphModule:
    """Drop-in for torch's function of the same name and call shape: launches and waits where exposed time is least.

    ``gm`` is changed and returned. With ``collective_bucketing`` collectives are merged as long as they stay hidden.
    Seconds are what ``custom_runtime_estimation(node, None)`` gives, in milliseconds; where that is None, or without it, what
    ``cluster`` can do, a preset's name or figures: nothing is measured here, whatever the estimators say. On ranks that really
    run all call it, and take the median of their seconds. ``max_in_flight_gb`` and both ``max_memory_increase_...`` are
    limits. What bounds torch's search alone (``max_compute_pre_fetch``, ``max_coll_distance``, ``max_off_bucket_gb``,
    ``bucket_exposed_first``, ``prioritize_...``, ``pre_bucketing_...``, ``log_...``) is taken and has no effect.
    ``report`` is called with what was done, if there is anything to do.

    Raises :class:`PlanError` for limits that cannot be kept and for what torch's keywords can not be here,
    :class:`SimulationError` for seconds that are none, :class:`PassError` for ranks with other graphs; ``gm`` is as it was.
    """
    given = dict(locals())
    _refuse(gm, given)
    figures = cluster_named(cluster, Path.cwd()) if isinstance(cluster, str) else cluster
    overlap = Overlap(
        schedule="auto",
        max_memory_increase=max_memory_increase_ratio,
        max_memory_increase_gb=max_memory_increase_gb,
        max_in_flight_gb=max_in_flight_gb,
        insert_overlap_deps=insert_overlap_deps,
    )
    dtypes = "mixed" if bucket_mode == "custom_ops_multidtype" else "separate"
    bucket = Bucket(enabled=collective_bucketing, by="overlap", dtypes=dtypes)
    cost = _cost(custom_runtime_estimation, figures, compute_overlap_multipler)
    estimates = Estimates(cost, figures, differs=custom_runtime_estimation is not None)

    def change(graph: fx.Graph, bucket: Bucket, estimates: Estimates | None) -> PassReport | None:
        """In place; a report takes time, and is made for those who ask."""
        own, targets = ManualPass(bucket, overlap), by_size(graph)
        if report is not None:
            return own.run(graph, targets, estimates)
        own.apply(graph, targets, estimates)
        return None

    def run(bucket: Bucket, estimates: Estimates | None) -> tuple[fx.Graph, PassReport | None]:
        graph = copy.deepcopy(gm.graph)
        forget_order(graph)
        return graph, change(graph, bucket, estimates)

    with collector.paused():
        if not any(map(is_wait, gm.graph.nodes)):
            return gm
        refuse_symbolic(gm.graph)
        if collective_bucketing or insert_overlap_deps:
            gm.graph, said = within_room(bucket, run, estimates)  # which recompiles
        else:  # nothing is changed before it is known to be right
            said = change(gm.graph, bucket, estimates)
            gm.recompile()
    if report is not None and said is not None:
        report(said)
    return gm


def _cost(estimation: Estimation | None, cluster: Cluster, scale: float) -> CostModel:
    roofline = Roofline(cluster, ranks_of_group)

    def seconds(node: fx.Node) -> float | None:
        milliseconds = None if estimation is None else estimation(node, None)
        if milliseconds is not None and not isinstance(milliseconds, (int, float)):
            return milliseconds  # no number: ``checked`` refuses it
        found = roofline(node) if milliseconds is None else milliseconds / 1000
        return found * scale if computes(node) else found

    return checked(seconds, "custom_runtime_estimation" if estimation is not None else "the cluster's own cost")


def _refuse(gm: object, given: dict[str, Any]) -> None:
    if not isinstance(gm, fx.GraphModule):
        raise PlanError(f"gm must be a torch.fx.GraphModule, not a value of type {type(gm).__name__}")
    estimation = given["custom_runtime_estimation"]
    if estimation is not None and not callable(estimation):
        raise PlanError(f"custom_runtime_estimation must be callable(node, size) or None, not {show(estimation)}")
    for name, values in _PLAIN.items():
        value = given[name]
        if value not in values:
            near = nearest(value, [one for one in values if isinstance(one, str)]) if isinstance(value, str) else ""
            raise PlanError(f"{name} must be {one_or_other([show(one) for one in values])} here, not {show(value)}{near}")
    for name in ("max_in_flight_gb", "max_memory_increase_gb", "max_memory_increase_ratio", "compute_overlap_multipler"):
        value = given[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise PlanError(f"{name} must be a number from 0, not {show(value)}")
    if given["report"] is not None and not callable(given["report"]):
        raise PlanError(f"report must be callable(report) or None, not {show(given['report'])}")
    if not isinstance(given["cluster"], (str, Cluster)):
        raise PlanError(f"cluster must be a preset's name or a Cluster, not {show(given['cluster'])}")
