"""Moves from one plan to others that differ in one decision: prefetch, schedule, caps, entries. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import ceil, log2
from typing import Any

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.consistency import agree
from pytest_fxbucket.plan.entries import Entry
from pytest_fxbucket.plan.pass_consistency import LIMITS
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Overlap
from pytest_fxbucket.tune.entries import apart, items_of, regrouped, runs, together, with_stars, written_out
from pytest_fxbucket.words import counted, show

# Both in the order in which they are tried where nothing else decides it.
_AHEAD = (2, 3, 1, 0)
_SIZES = (2, 4, 1)
_MOST_PAIRS = 16
_MB = 1 << 20
_LATE, _EARLY, _BUSY, _LITTLE = "launched too late", "waited for too early", "behind another launch", "too little compute"
"""Why collectives are exposed: see :mod:`pytest_fxbucket.simulate.timeline`."""
_ANY = frozenset({_LATE, _EARLY, _BUSY, _LITTLE, "memory"})
BY_HAND = ("prefetch", "defer_reduce", "updates")
"""Keys of [overlap] that are taken out for ``schedule = "auto"``; places that somebody wrote are not, and it is refused."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts about a plan's step that decide which moves there are."""

    entries: Sequence[str] = ()
    """Names of all entries on the model, in the plan's order."""
    largest: int = 0
    """Bytes of the largest launch of any plan so far."""
    numbered: frozenset[str] = frozenset()
    """Modules whose children are all numbered, such as layers."""


@dataclass(frozen=True, slots=True)
class PlanMove:
    """A plan that differs from another in one decision."""

    plan: Plan
    says: str
    """The change, as a plan file would say it: ``[overlap] prefetch = 2``."""
    helps: frozenset[str] = frozenset()
    """The reasons of exposure that the change may remove; it is tried sooner where more is exposed for these reasons."""
    takes_back: bool = False
    """Whether it undoes an earlier change, so that it is kept even if it wins nothing, as long as it loses nothing."""

    @property
    def kind(self) -> str:
        """The table and the first key that it changes, ``[overlap] prefetch``."""
        return " ".join(self.says.split()[:2])


Moves = Callable[[Plan, StepFacts], Iterator[PlanMove]]


def moves_of(plan: Plan, facts: StepFacts, start: Plan) -> list[PlanMove]:
    """All moves from ``plan`` to plans that are consistent; ``start`` is the plan that the search began with."""
    found = [move for moves in _ALL for move in moves(plan, facts)]
    once = {key_of(move.plan): move for move in [*found, *_taken_back(plan, start)]}  # of two alike the one that takes back
    return [move for move in once.values() if move.plan != plan and _is_legal(move.plan)]


def key_of(plan: Plan) -> str:
    """A key of all that moves change: text, since the tables hold dicts, which cannot be hashed."""
    return repr((plan.bucket, plan.overlap))


def _is_legal(plan: Plan) -> bool:
    try:
        agree(plan, "")
    except PlanError:
        return False
    return True


def _overlap(plan: Plan, **keys: Any) -> Plan:
    return replace(plan, overlap=replace(plan.overlap, **keys))


def _bucket(plan: Plan, **keys: Any) -> Plan:
    return replace(plan, bucket=replace(plan.bucket, **keys))


def _prefetch(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    if plan.overlap.schedule == "manual":
        for ahead in _AHEAD:
            helps = {_LATE, _LITTLE} if ahead > plan.overlap.prefetch else {_BUSY, "memory"}
            yield PlanMove(_overlap(plan, prefetch=ahead), f"[overlap] prefetch = {ahead}", frozenset(helps))


def _defer_reduce(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    if plan.overlap.schedule == "manual":
        other = not plan.overlap.defer_reduce
        yield PlanMove(
            _overlap(plan, defer_reduce=other),
            f"[overlap] defer_reduce = {show(other)}",
            frozenset({_EARLY, _LITTLE} if other else {"memory"}),
        )


def _schedule(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    """The other schedule, without the keys that only the old one takes.

    Launch places that the user wrote stay, so that the automatic schedule is then refused as inconsistent; so it is in a plan
    without a cluster.
    """
    overlap, plain = plan.overlap, Overlap()
    if overlap.schedule == "auto":
        # by = "overlap" needs the automatic schedule. Without entries it cannot become "plan", and then the move is refused.
        by = "plan" if plan.bucket.by == "overlap" and plan.bucket.plan else plan.bucket.by
        manual = _overlap(plan, schedule="manual", **{key: getattr(plain, key) for key in LIMITS})
        yield PlanMove(_bucket(manual, by=by), '[overlap] schedule = "manual"')
    else:
        auto = _overlap(plan, schedule="auto", **{key: getattr(plain, key) for key in BY_HAND})
        yield PlanMove(auto, '[overlap] schedule = "auto"', _ANY)
        # For a plan that is near its limit: the schedule that needs no more memory at the peak than the step before the pass.
        limited = _overlap(auto, max_memory_increase=0.0)
        yield PlanMove(limited, '[overlap] schedule = "auto", max_memory_increase = 0', frozenset({"memory"}))


def _gather_group(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    other = "own" if plan.overlap.gather_group == "same" else "same"
    # On a process group of their own all-gathers do not queue behind reductions.
    helps = frozenset({_BUSY} if other == "own" else ())
    yield PlanMove(_overlap(plan, gather_group=other), f"[overlap] gather_group = {show(other)}", helps)


def _by(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    if plan.bucket.has_entries and plan.bucket.plan and plan.bucket.enabled:
        other = "overlap" if plan.bucket.by == "plan" else "plan"
        yield PlanMove(_bucket(plan, by=other), f"[bucket] by = {show(other)}", frozenset({_BUSY, _LITTLE}))


def _cap_mb(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    if len(plan.bucket.cap_mb) > 1 or not plan.bucket.enabled or not facts.largest:
        return
    (now,) = plan.bucket.cap_mb
    most = facts.largest / _MB
    # The largest power of two below the largest launch, which such a cap would split; a larger cap changes nothing.
    half = 2.0 ** (ceil(log2(most)) - 1)
    for cap in (now / 2, 2 * now, 0.0) if now else (half / 2, half):  # 0.0: no cap
        if cap < most:
            yield PlanMove(_bucket(plan, cap_mb=(cap,)), f"[bucket] cap_mb = {cap:g}", frozenset({_BUSY, _LITTLE}))


def _has_movable_entries(plan: Plan) -> bool:
    """Whether entries may be merged and split: not with a list of caps, which belongs to the entries by their order."""
    return plan.bucket.has_entries and plan.bucket.enabled and len(plan.bucket.cap_mb) == 1


def _numbered(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    """Runs of numbered layers in entries of two, of four, or each alone."""
    entries = written_out(plan, facts.entries)
    for begin, end in runs(entries) if _has_movable_entries(plan) else ():
        own = entries[begin:end]
        count = sum(len(entry.selectors) for entry in own)
        for size in _SIZES:
            made = regrouped(own, size)
            if size <= count and made != own:
                how = f"[bucket] plan has {_named(own)} in entries of {size}"
                yield _of_entries(plan, entries, [*entries[:begin], *made, *entries[end:]], how, size > 1)


def _neighbours(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    """Two neighbouring entries merged, except two of one run of layers, which :func:`_numbered` merges all alike.

    Of many pairs only the first and the last are tried.
    """
    entries = written_out(plan, facts.entries) if _has_movable_entries(plan) else []
    # The last of a run is not among them: it may be merged with the entry behind the run.
    within = {place for begin, end in runs(entries) for place in range(begin, end - 1)}
    pairs = [place for place, _ in enumerate(pairwise(entries)) if place not in within]
    # Of few pairs the two halves overlap.
    for place in dict.fromkeys([*pairs[: _MOST_PAIRS // 2], *pairs[-_MOST_PAIRS // 2 :]]):
        one = together(entries[place : place + 2])
        how = f"[bucket] plan has {show(one.name)} as one entry"
        yield _of_entries(plan, entries, [*entries[:place], one, *entries[place + 2 :]], how, True)


def _parted(plan: Plan, facts: StepFacts) -> Iterator[PlanMove]:
    """An entry of several selectors split into one for each, and one of a module with numbered children split into these."""
    entries = written_out(plan, facts.entries) if _has_movable_entries(plan) else []
    # Merged layers are parted by ``_numbered``, all of a run alike.
    layers = {place for begin, end in runs(entries) for place in range(begin, end)}
    for place, entry in enumerate(entries):
        if len(entry.selectors) > 1 and place not in layers:
            parts, how = apart(entry), f'[bucket] plan has "{entry.name}" apart'
        elif entry.name in facts.numbered:
            parts, how = [Entry(f"{entry.name}.*", (f"{entry.name}.*",))], f'[bucket] plan has "{entry.name}.*"'
        else:
            continue
        yield _of_entries(plan, entries, [*entries[:place], *parts, *entries[place + 1 :]], how, False)


def _of_entries(plan: Plan, before: Sequence[Entry], after: Sequence[Entry], says: str, merges: bool) -> PlanMove:
    helps = frozenset({_LITTLE, _LATE} if merges else {_BUSY, "memory"})
    bucket = replace(plan.bucket, plan=with_stars(plan, before, after))
    return PlanMove(replace(plan, bucket=bucket), says, helps)


def _named(entries: Sequence[Entry]) -> str:
    singles = items_of([single for entry in entries for single in apart(entry)])
    return singles[0] if len(singles) == 1 else counted(len(singles), "module")


def _taken_back(plan: Plan, start: Plan) -> Iterator[PlanMove]:
    """One changed key set back, so that a change that a later one has made useless is not proposed."""
    for name in ("bucket", "overlap"):
        now, then = getattr(plan, name), getattr(start, name)
        for key in (spec.name for spec in fields(then)):
            if getattr(now, key) != getattr(then, key):
                keys: dict[str, Any] = {name: replace(now, **{key: getattr(then, key)})}
                yield PlanMove(replace(plan, **keys), f"[{name}] {key} as it was", takes_back=True)


_ALL: tuple[Moves, ...] = (
    *(_schedule, _prefetch, _gather_group, _numbered, _defer_reduce, _by, _cap_mb, _parted, _neighbours),
)
