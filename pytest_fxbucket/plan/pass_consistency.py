"""Keys of ``[bucket]`` and ``[overlap]`` that contradict each other, or the entries that a plan has. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap
from pytest_fxbucket.plan.selectors import Resolution, resolve
from pytest_fxbucket.plan.table_rules import Places
from pytest_fxbucket.words import show

_BY_HAND = ("prefetch", "defer_reduce", "updates", "launch_at", "wait_before")
"""Keys of ``[overlap]`` that place launches by hand."""
LIMITS = ("max_memory_increase", "max_memory_increase_gb", "max_in_flight_gb", "max_prefetch")
"""Keys of ``[overlap]`` that limit the automatic schedule."""


def agree_on_pass(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    _on_overlap(plan, where)
    if plan.bucket.has_entries:
        _by_plan(plan, where)
    else:
        _by_size(plan, where)


def agree_with_entries(plan: Plan, entries: Sequence[str], where: str) -> None:
    """Raise PlanError, beginning with ``where``, for keys that name entries which the plan does not have, or too many caps.

    ``entries`` are the names of all of them, in order, ranges and stars written out.
    """
    caps = plan.bucket.cap_mb
    # A single cap is for all, and may stand where there is no entry at all.
    if len(caps) > max(1, len(entries)):
        held = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
        raise PlanError(f"{where}: [bucket] cap_mb has {len(caps)} caps for {held}; give one an entry at most")
    _refuse_wrong_places("launch_at", plan.overlap.launch_at, entries, where)
    _refuse_wrong_places("wait_before", plan.overlap.wait_before, entries, where)


def entries_of(plan: Plan, names: Mapping[str, str], modules: Sequence[str]) -> Resolution:
    """The entries of ``plan`` with their parameters; empty if buckets are by size. Raises PlanError as :func:`resolve`."""
    bucket = plan.bucket
    if not bucket.has_entries:
        return Resolution((), (), ())
    where = f"{plan.path}: [bucket]"
    found = resolve(bucket.plan, names, modules, aliases=names, unplanned=bucket.unplanned, where=where)
    agree_with_entries(plan, [entry.name for entry in found.entries], str(plan.path))
    return found


def _by_plan(plan: Plan, where: str) -> None:
    bucket = plan.bucket
    if bucket.enabled and not bucket.plan and not bucket.root:
        raise PlanError(f'{where}: [bucket] plan has no entry; name one, or use unplanned = "root" or enabled = false')
    entries = _names(bucket)
    if entries is not None:
        agree_with_entries(plan, entries, where)


def _names(bucket: Bucket) -> list[str] | None:
    """Names of all entries; None if an entry has a star of its own, for which the model must be known."""
    # Within ``+`` a star does not matter here: the entry's name is its text.
    if any(len(entry.selectors) == 1 and "*" in entry.selectors[0].split(".") for entry in bucket.plan):
        return None
    return [entry.name for entry in bucket.plan] + ([bucket.root] if bucket.root else [])


def _by_size(plan: Plan, where: str) -> None:
    """Refuse keys about entries in a plan whose buckets are by size or overlap: neighbours share a bucket up to a cap."""
    bucket, overlap = plan.bucket, plan.overlap
    by = f"by = {show(bucket.by)}"
    # Of several caps only the last may be 0: it is for the rest.
    if bucket.enabled and bucket.by == "size" and not all(bucket.cap_mb[:-1] or bucket.cap_mb):
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


def _on_overlap(plan: Plan, where: str) -> None:
    overlap, plain = plan.overlap, Overlap()
    inside = f"{where}: [overlap]"
    if plan.bucket.by == "overlap":
        _by_overlap(plan, where)
    if overlap.schedule == "manual":
        if limit := next((key for key in LIMITS if getattr(overlap, key) is not None), None):
            raise PlanError(f'{inside} {limit} is a limit of schedule = "auto", and the schedule is "manual"; leave one out')
        return
    # A key that is written out with its default cannot be told from one left out, and is let pass.
    if key := next((key for key in _BY_HAND if getattr(overlap, key) != getattr(plain, key)), None):
        raise PlanError(
            f'{inside} {key} = {show(getattr(overlap, key))} says by hand what schedule = "auto" finds; leave one out'
        )
    if plan.cluster is None:
        raise PlanError(
            f'{inside} schedule = "auto" goes by seconds on [cluster], and there is none; give one, such as a preset'
        )


def _by_overlap(plan: Plan, where: str) -> None:
    bucket = plan.bucket
    if plan.overlap.schedule != "auto":
        raise PlanError(
            f'{where}: [bucket] by = "overlap" keeps hidden what [overlap] schedule = "auto" hides; set that, not "manual"'
        )
    if len(bucket.cap_mb) > 1:
        raise PlanError(f'{where}: [bucket] by = "overlap" takes one cap_mb for all buckets, not {len(bucket.cap_mb)}')


def _refuse_wrong_places(key: str, by_direction: Places, entries: Sequence[str], where: str) -> None:
    """Raise PlanError, beginning with ``where``, for pairs that name no entry of ``entries``, or that form a circle.

    ``key`` is ``launch_at`` or ``wait_before``. Whether a place can be had in a graph is for the pass to tell.
    """
    for direction, pairs in by_direction.items():
        inside = f"{where}: [overlap] {key}.{direction}"
        for entry, other in pairs.items():
            for name in (entry, other):
                if name not in entries:
                    raise PlanError(f'{inside}: "{entry}" = "{other}" names no bucket: {_no_entry(name, entries)}')
        circle = _circle(pairs)
        if circle:
            raise PlanError(f"{inside}: {_says(circle)}")


def _no_entry(name: str, entries: Sequence[str]) -> str:
    """Say that ``name`` is no entry, and which one is meant."""
    holders = [entry for entry in entries if any(name == part or name.startswith(f"{part}.") for part in entry.split("+"))]
    if holders:
        return f'"{name}" is within the entry "{holders[0]}"; name that'
    close = get_close_matches(name, entries, n=1, cutoff=0.6)
    if close:
        return f'there is no entry "{name}"; did you mean "{close[0]}"?'
    more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
    return f'there is no entry "{name}"; entries are {", ".join(entries[:6])}{more}'


def _circle(pairs: Mapping[str, str]) -> list[str]:
    """A circle of entries, each placed at the next one and the last at the first; empty if there is none.

    Every entry is placed at one other at most, so a walk from it either ends or comes back.
    """
    done: set[str] = set()
    for start in pairs:
        walk: list[str] = []
        entry: str | None = start
        while entry is not None and entry not in done:
            done.add(entry)
            walk.append(entry)
            entry = pairs.get(entry)
        # The walk came back to itself. An entry of an earlier walk is done as well, and led into no circle.
        if entry in walk:
            return walk[walk.index(entry) :]
    return []


def _says(circle: Sequence[str]) -> str:
    if len(circle) == 1:
        return f'"{circle[0]}" is placed at itself; name the entry whose compute is to hide it'
    ring = " -> ".join([*circle, circle[0]])
    return f"the pairs form a circle, {ring}; each would have to come before the next, so take one out"
