"""Keys of ``[run]``, ``[cluster]`` and ``[checks]`` that contradict each other. Pure; imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.cluster import PRESETS, MemoryLimits, lacking
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.words import one_or_other, show


def agree_on_run(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    _on_a_ring(plan, where)
    _compiled(plan, where)
    _on_a_cluster(plan, where)


def _on_a_ring(plan: Plan, where: str) -> None:
    run = plan.run
    if run.reduce == "rank_order":
        if run.ring is not None:
            raise PlanError(f'{where}: [run] ring is there, and reduce = "rank_order" goes round none; use reduce = "ring"')
        return
    if not plan.checks.eager:
        raise PlanError(
            f'{where}: [run] reduce = "ring" is what eager adds by, and checks.eager is false; leave one of them out'
        )
    if run.ring is not None and plan.run_world % run.ring.nodes:
        raise PlanError(
            f"{where}: [run] ring.nodes = {run.ring.nodes} does not divide the {plan.run_world} ranks that are run; "
            "each node has as many"
        )


def _compiled(plan: Plan, where: str) -> None:
    inside = f'{where}: [run] compiler = "{plan.run.compiler}"'
    if plan.run.compiler == "none":
        return
    if not plan.checks.bitwise:
        raise PlanError(f"{inside} is what bitwise runs, and checks.bitwise is false; leave one of them out")
    if plan.pipeline is not None or plan.crosses_iterations:
        what = "[pipeline]" if plan.pipeline is not None else "next_iteration"
        raise PlanError(f"{inside} compiles a step of one graph, and {what} makes several of it; leave one of them out")


def _on_a_cluster(plan: Plan, where: str) -> None:
    cluster, overlap, memory = plan.cluster, plan.checks.overlap, plan.checks.memory
    # What a preset lacks is told when its file is read; no file is opened here.
    if cluster is not None and cluster.preset is None and (missing := lacking(cluster)):
        raise PlanError(
            f"{where}: [cluster] has neither {missing} nor a preset that has it; give preset, "
            f"{one_or_other([show(one) for one in PRESETS])}, or all figures"
        )
    for name, is_on, has_limits, example in (
        ("overlap", bool(overlap), bool(overlap and overlap.limits()), "{ exposed_max_ms = 1.5, hidden_min = 0.9 }"),
        # ``memory = true`` is read as a table of defaults, which has no limit.
        ("memory", bool(memory), memory not in (False, MemoryLimits()), "{ peak_max_gb = 70, increase_max = 0.1 }"),
    ):
        if is_on and cluster is None:
            raise PlanError(
                f"{where}: [checks] {name} simulates the step on [cluster], and there is none; give one, such as preset = "
                f"{show(PRESETS[0])}"
            )
        if is_on and not has_limits:
            raise PlanError(f"{where}: [checks] {name} has no limit; give it one, as in {example}")
