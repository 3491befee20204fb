"""Keys of a plan file that contradict each other, or that would be read and ignored together."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.agree_on_mesh import agree_on_mesh
from pytest_fxbucket.plan.agree_on_step import agree_on_step
from pytest_fxbucket.plan.agree_on_transforms import agree_on_transforms
from pytest_fxbucket.plan.places import refuse_wrong_places
from pytest_fxbucket.plan.schema import Bucket, Plan
from pytest_fxbucket.plan.selector import ROOT
from pytest_fxbucket.units import show


def agree(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    if plan.model is None and plan.graph is None:
        raise PlanError(f"{where}: there is neither [model] nor [graph]; one of them says what is checked")
    if plan.model is not None and plan.graph is not None:
        raise PlanError(f"{where}: [model] and [graph] are both there; keep the one that is to be checked")
    agree_on_mesh(plan, where)
    agree_on_step(plan, where)
    agree_on_transforms(plan, where)
    _on_a_ring(plan, where)
    if plan.bucket.by == "size":
        _by_size(plan, where)
    else:
        _by_plan(plan, where)


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


def agree_with_entries(plan: Plan, entries: Sequence[str], where: str) -> None:
    """Raise PlanError, beginning with ``where``, for keys that speak of other entries than those the plan has.

    ``entries`` are the names of all of them, in order, ranges and stars written out.
    """
    caps = plan.bucket.cap_mb
    if len(caps) > max(1, len(entries)):
        held = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
        raise PlanError(f"{where}: [bucket] cap_mb has {len(caps)} caps for {held}; give one an entry at most")
    refuse_wrong_places("launch_at", plan.overlap.launch_at, entries, where)
    refuse_wrong_places("wait_before", plan.overlap.wait_before, entries, where)


def _by_plan(plan: Plan, where: str) -> None:
    bucket = plan.bucket
    if bucket.enabled and not bucket.plan and bucket.unplanned != ROOT:
        raise PlanError(f'{where}: [bucket] plan has no entry; name one, or use unplanned = "root" or enabled = false')
    entries = _names(bucket)
    if entries is not None:
        agree_with_entries(plan, entries, where)


def _names(bucket: Bucket) -> list[str] | None:
    """Names of all entries; None if only the model can tell."""
    if any(len(entry.selectors) == 1 and "*" in entry.selectors[0].split(".") for entry in bucket.plan):
        return None
    return [entry.name for entry in bucket.plan] + ([ROOT] if bucket.unplanned == ROOT else [])


def _by_size(plan: Plan, where: str) -> None:
    """By size there are no entries: neighbours share a bucket up to a cap."""
    bucket, overlap = plan.bucket, plan.overlap
    by = 'by = "size"'
    if bucket.enabled and not all(bucket.cap_mb[:-1] or bucket.cap_mb):
        zero = "0" if len(bucket.cap_mb) == 1 else "a 0 before its end"
        raise PlanError(
            f"{where}: [bucket] {by} fills buckets up to cap_mb, which has {zero} (no cap); set it, as in cap_mb = 25"
        )
    if bucket.plan:
        raise PlanError(f"{where}: [bucket] plan names entries, and {by} makes none; leave plan out, or empty in a matrix row")
    if bucket.unplanned != "error":
        raise PlanError(
            f"{where}: [bucket] unplanned = {show(bucket.unplanned)} means nothing with {by}, which leaves no parameter out; "
            "leave it out"
        )
    for key, places in (("launch_at", overlap.launch_at), ("wait_before", overlap.wait_before)):
        if places:
            raise PlanError(f"{where}: [overlap] {key} names entries, and {by} makes none; use prefetch and defer_reduce")
