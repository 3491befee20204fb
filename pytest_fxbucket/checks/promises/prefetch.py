"""Does communication hide behind compute as the plan promises?"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from pytest_fxbucket.checks.promises.expectations import DIRECTIONS, Expectations, by_round, of_kind, of_round, stages_of
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.compute import in_round
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.step.roles import Direction


Stages = dict[str, list["Bucket"]]
"""Buckets by entry, in order of their first waits: a parameter may be read long before anything is computed of it."""


class StageStart(NamedTuple):
    """The position at which a stage begins, and its name in sentences."""

    words: str
    place: int


Marks = dict[str, StageStart]
"""By entry, in order."""
Round = tuple[Stages, Marks]
"""The gathers of one direction and round, and the marks of its entries."""


def overlap_problems(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """How ``passed`` breaks the promised schedule, one sentence each; ``captured`` is the graph before the pass.

    Exempt are launches that cannot stand earlier, since they need the result of another wait, and waits that cannot stand
    later, since another launch needs their result. That must have been so before the pass: a bucket that waits for another one
    only because of how the pass packed it has lost its overlap too.
    """
    hidden = _Hidden(captured, passed)
    for direction in DIRECTIONS:
        before, now = (rounds_of(promise, reading, direction) for reading in (captured, passed))
        # Marks at one place are one use, for which ``prefetch`` counts once.
        uses = sorted({mark.place: mark for _, marks in now.values() for mark in marks.values()}.values(), key=_place)
        for number, (stages, marks) in now.items():
            old = before.get(number, ({}, {}))
            soonest = _soonest(promise, passed, uses, (stages, marks), direction)
            yield from _prefetching(promise, old, (stages, marks), soonest, direction, number)
            yield from _over_other_direction(promise, hidden, old[0], stages, direction, number)
    yield from _exposed(promise, captured, passed, hidden)
    yield from _deferring(promise, captured, passed)
    yield from placing_problems(promise, passed)


def rounds_of(promise: Expectations, reading: GraphAnalysis, direction: Direction) -> dict[int, Round]:
    """The gathers of each round of ``direction``, by its number."""
    stages = {n: _stages(promise, buckets) for n, buckets in by_round(of_kind(reading, direction, "all_gather")).items()}
    return {number: (here, _marks(promise, reading, here, direction, number)) for number, here in stages.items()}


def _soonest(
    promise: Expectations, passed: GraphAnalysis, uses: Sequence[StageStart], now: Round, direction: Direction
) -> Marks:
    """By entry of a round, the mark before which none of its gathers need be launched; ``uses`` are the marks of all rounds.

    The rounds of an entry that is gathered again and again are used in turn, so ``prefetch`` counts marks of all rounds. No
    gather need be launched ahead of compute of the other direction that stands before its mark.
    """
    # The latest of up to three marks holds: ``prefetch`` entries back in this round, ``prefetch`` marks back in all rounds, and
    # the first mark behind the last compute of the other direction.
    stages, marks = now
    places, names = [mark.place for mark in uses], list(marks)
    others = [where for where, of, _ in passed.computes if of != direction]
    found = {}
    for index, (name, mark) in enumerate(marks.items()):
        ahead = names[max(0, index - promise.overlap.prefetch)]
        known = [marks[ahead], uses[max(0, bisect_left(places, mark.place) - promise.overlap.prefetch)]]
        before = bisect_left(others, mark.place)
        if ahead in stages and before:
            # There is one in any case: the mark itself stands behind that compute.
            known.append(uses[bisect_right(places, others[before - 1])])
        found[name] = max(known, key=_place)
    return found


def _place(mark: StageStart) -> int:
    return mark.place


def _prefetching(
    promise: Expectations, before: Round, now: Round, soonest: Marks, direction: Direction, number: int
) -> Iterator[str]:
    """Sentences on gathers of one direction and round that are launched too late or too early for ``prefetch``."""
    # The first entry has nothing in front of it to be prefetched behind. An early launch counts only if it was not early before
    # the pass already.
    (old, were), (stages, marks) = before, now
    names = list(marks)
    for index, name in enumerate(names[1:], 1):
        if name not in stages:
            continue
        free = _free(promise, stages, name, direction)
        was_bound = any(bucket.blocked >= 0 for bucket in old.get(name, []))
        what = _gather(name, direction, number)
        ahead = soonest[name]
        if promise.overlap.prefetch and any(
            ahead.place < bucket.launch and not (was_bound and bucket.blocked >= ahead.place) for bucket in free
        ):
            yield f"{what} is launched after {ahead.words}: prefetch = {promise.overlap.prefetch} is not reached"
        early = names[max(0, index - promise.overlap.prefetch - 1)]
        if index > promise.overlap.prefetch and any(bucket.launch < marks[early].place for bucket in free):
            was = [bucket.launch for bucket in old.get(name, [])]
            if not was or early not in were or min(was) > were[early].place:
                yield f"{what} is launched before {marks[early].words}: earlier than prefetch = {promise.overlap.prefetch}"


def _marks(promise: Expectations, reading: GraphAnalysis, stages: Stages, direction: Direction, number: int) -> Marks:
    """First waits of ``stages``; in backward, before them, the starts of entries that compute on forward's gathers."""
    waits = {
        name: StageStart(f"the wait for {name}", min(bucket.wait for bucket in stage if bucket.wait is not None))
        for name, stage in stages.items()
    }
    if direction == "forward" or not waits or not promise.bucket.has_entries:
        return waits
    first = min(mark.place for mark in waits.values())
    gathered = {of: [fqn for bucket in of_kind(reading, of, "all_gather") for fqn in bucket.fqns] for of in DIRECTIONS}
    entries = {of: dict.fromkeys(promise.entry_of[n] for n in fqns if n in promise.entry_of) for of, fqns in gathered.items()}
    starts = {
        # An entry that computes nothing here is put at ``first``, and so gets no mark below.
        entry: min(starts_of(promise, reading, direction, entry, number), default=first)
        for entry in entries["forward"]
        if entry not in entries["backward"]
    }
    in_order = sorted((place, entry) for entry, place in starts.items() if place < first)
    return {entry: StageStart(f"the start of {entry}'s compute", place) for place, entry in in_order} | waits


def _over_other_direction(
    promise: Expectations, hidden: _Hidden, before: Stages, stages: Stages, direction: Direction, number: int
) -> Iterator[str]:
    """The first gathers of a round must stay behind the compute of the other direction that they stood behind before."""
    began = min((bucket.launch for stage in before.values() for bucket in stage), default=0)
    for name in list(stages)[: promise.overlap.prefetch + 1]:
        free = _free(promise, stages, name, direction)
        launched = min((bucket.launch for bucket in free), default=began)
        over = [(of, fqn) for of, fqn, _ in hidden.before_and_no_more(began, launched) if of != direction]
        if over:
            names = promise.entries_of(fqn for of, fqn in over if of == over[0][0])
            yield f"{_gather(name, direction, number)} is launched in {over[0][0]}, before the compute of {some(names)}"


def _free(promise: Expectations, stages: Stages, name: str, direction: Direction) -> list[Bucket]:
    """Launches of the stage ``name``, unless the user placed them."""
    return [] if name in promise.overlap.launch_at.get(direction, {}) else stages[name]


def _gather(name: str, direction: Direction, number: int) -> str:
    return f"entry {name}, {direction} all_gather{of_round(number)}"


def _stages(promise: Expectations, buckets: Sequence[Bucket]) -> Stages:
    return stages_of(promise, buckets, lambda bucket: bucket.wait or 0)


def _exposed(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis, hidden: _Hidden) -> Iterator[str]:
    """No gather may be waited for before compute that, before the pass, ran ahead of the first wait for its members."""
    waits = {(b.direction, b.round, m.fqn): b.wait for b in captured.buckets if b.kind == "all_gather" for m in b.members}
    for bucket in passed.buckets:
        old = [w for fqn in bucket.fqns if (w := waits.get((bucket.direction, bucket.round, fqn))) is not None]
        planned = next((fqn for fqn in bucket.fqns if promise.is_planned(fqn)), None)
        if bucket.kind != "all_gather" or bucket.wait is None or not old or planned is None:
            continue
        entry = promise.entry_of.get(planned, planned)
        ahead = hidden.before_and_no_more(min(old), bucket.wait)
        if ahead:
            names = promise.entries_of(fqn for _, fqn, _ in ahead)
            what = _gather(entry, bucket.direction, bucket.round)
            yield f"{what} is waited for before {some(names)} computes, which used to hide it: it is exposed"


class _Hidden:
    """Every compute, by (direction, FQN, nth), with its position before the pass and its position now."""

    def __init__(self, captured: GraphAnalysis, passed: GraphAnalysis) -> None:
        now = {key: where for where, key in numbered(passed) if where < passed.last}
        self.before = sorted((where, key, now[key]) for where, key in numbered(captured) if key in now)
        self.places = [where for where, _, _ in self.before]
        self.latest = list(accumulate((now for _, _, now in self.before), max))
        """For each compute, the last position now among it and those before it: mostly tells at once that none has moved."""

    def before_and_no_more(self, then: int, now: int) -> list[tuple[str, str, int]]:
        """Computes that stood before position ``then`` and stand behind ``now``, sorted."""
        count = bisect_left(self.places, then)
        if not count or self.latest[count - 1] < now:
            return []
        return sorted(key for _, key, place in self.before[:count] if place >= now)


def numbered(reading: GraphAnalysis) -> list[tuple[int, tuple[Direction, str, int]]]:
    """(position, (direction, FQN, nth)) of every compute; products that read no parameter count backwards, from -1 on."""
    found: list[tuple[int, tuple[Direction, str, int]]] = []
    for step, computes in ((1, reading.computes), (-1, reading.products)):
        seen: Counter[tuple[Direction, str]] = Counter()
        for where, direction, fqn in computes:
            found.append((where, (direction, fqn, seen[direction, fqn] * step - (step < 0))))
            seen[direction, fqn] += 1
    return sorted(found)


def _deferring(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """Sentences on reductions that are not deferred though they should be, or are though they should not.

    A reduction is deferred if it is waited for behind the launch of the next entry's. Reductions that follow each other, as in
    hybrid sharding, are levels, and each level is looked at alone.
    """
    at = {bucket.launch: bucket for bucket in captured.buckets}
    bound = {(b.kind, b.level, fqn) for b in captured.buckets if _is_bound(promise, at, b) for fqn in b.fqns}
    levels: dict[int, list[Bucket]] = {}
    for bucket in passed.buckets:
        if bucket.kind in REDUCTIONS and bucket.direction == "backward":
            levels.setdefault(bucket.level, []).append(bucket)
    for reductions in levels.values():
        stages = stages_of(promise, reductions, lambda b: b.launch)
        in_order = sorted(stages.items(), key=lambda item: max(bucket.launch for bucket in item[1]))
        for (name, stage), (following, next_stage) in pairwise(in_order):
            launched = max(other.launch for other in next_stage)
            for bucket in stage if name not in promise.overlap.wait_before.get("backward", {}) else []:
                # Asked of members, since the buckets of before had others.
                was_bound = any((bucket.kind, bucket.level, fqn) in bound for fqn in bucket.fqns)
                if bucket.wait is None or (was_bound and bucket.needed is not None and bucket.needed <= launched):
                    continue
                what = f"entry {name}, backward {bucket.kind}"
                if promise.overlap.defer_reduce and bucket.wait < launched:
                    yield f"{what} is waited for before {following} launches its reduction: it is not deferred"
                if not promise.overlap.defer_reduce and bucket.wait > launched:
                    yield f"{what} is waited for after {following} launches its reduction, but defer_reduce = false"
        if promise.overlap.defer_reduce:
            yield from _held_too_long(promise, captured, in_order)


def _held_too_long(
    promise: Expectations, captured: GraphAnalysis, in_order: Sequence[tuple[str, Sequence[Bucket]]]
) -> Iterator[str]:
    """Sentences on reductions that are waited for behind the launch after the next entry's; ``in_order`` of launch."""
    for (name, stage), (late, late_stage) in zip(in_order, in_order[2:], strict=False):
        too_late = min(other.launch for other in late_stage)
        for bucket in stage if name not in promise.overlap.wait_before.get("backward", {}) else []:
            if bucket.wait is not None and bucket.wait > too_late and not _was_late(captured, bucket, late_stage):
                yield (
                    f"entry {name}, backward {bucket.kind} is waited for only after {late} launches its reduction: its memory "
                    "is held longer than to the next launch"
                )


def _was_late(captured: GraphAnalysis, bucket: Bucket, late_stage: Sequence[Bucket]) -> bool:
    """Whether a member of ``bucket`` was waited for behind a launch of ``late_stage`` before the pass, too."""
    late = {(one.kind, one.level, fqn) for one in late_stage for fqn in one.fqns}
    launched = [one.launch for one in captured.buckets if any((one.kind, one.level, fqn) in late for fqn in one.fqns)]
    own = [
        one.wait
        for one in captured.buckets
        if one.wait is not None and one.kind == bucket.kind and one.level == bucket.level and set(one.fqns) & set(bucket.fqns)
    ]
    return not launched or not own or max(own) > min(launched)


def _is_bound(promise: Expectations, at: Mapping[int, Bucket], bucket: Bucket) -> bool:
    """Whether a launch needs what ``bucket`` brings, so that its wait cannot be late; ``at`` has launches by position.

    A further reduction of the same entry does not count, unless it is bound itself: it can be late too.
    """
    if bucket.needed is None:
        return False
    following = at.get(bucket.needed)
    if following is None or following.level <= bucket.level or _entries(promise, following) != _entries(promise, bucket):
        return True
    return _is_bound(promise, at, following)


def _entries(promise: Expectations, bucket: Bucket) -> set[str]:
    return {promise.entry_of.get(fqn, fqn) for fqn in bucket.fqns}


# Do launches and waits that the user placed by hand stand where they were placed, right before an entry's compute?


def placing_problems(promise: Expectations, passed: GraphAnalysis) -> Iterator[str]:
    """Launches of ``launch_at``, and waits of ``wait_before``, that do not stand right before the compute they name."""
    for direction in DIRECTIONS:
        here = [bucket for bucket in passed.buckets if bucket.direction == direction]
        for entry, other in sorted(promise.overlap.launch_at.get(direction, {}).items()):
            gathers = [b for b in here if b.kind == "all_gather" and _is_of(promise, b.fqns, entry)]
            # Without any gather there is no round, and one look all the same, to say that there is none.
            for number, buckets in by_round(gathers).items() or {0: gathers}.items():
                what = f"entry {entry}, {direction} all_gather{of_round(number)} is not launched"
                starts = starts_of(promise, passed, direction, other, number)
                yield from _misplaced(promise, passed, starts, (direction, other), [b.launch for b in buckets], what)
        for entry, other in sorted(promise.overlap.wait_before.get(direction, {}).items()):
            reductions = [b for b in here if b.kind in REDUCTIONS and _is_of(promise, b.fqns, entry)]
            last = max((bucket.level for bucket in reductions), default=0)
            # Of an entry that is reduced in several steps only the last wait is placed: the others must come before it.
            waits = [bucket.wait for bucket in reductions if bucket.wait is not None and bucket.level == last]
            what = f"entry {entry}, {direction} reduction is not waited for"
            starts = starts_of(promise, passed, direction, other, None)
            yield from _misplaced(promise, passed, starts, (direction, other), waits, what)


def _is_of(promise: Expectations, fqns: tuple[str, ...], entry: str) -> bool:
    return any(promise.entry_of.get(fqn) == entry for fqn in fqns)


def starts_of(promise: Expectations, reading: GraphAnalysis, direction: Direction, entry: str, number: int | None) -> list[int]:
    """Positions, ascending, at which ``entry`` computes in ``direction`` in the round ``number``; None is the last round."""
    own = [where for where, of, fqn in reading.computes if of == direction and promise.entry_of.get(fqn) == entry]
    opposite = "backward" if direction == "forward" else "forward"
    return in_round(own, [where for where, of, _ in reading.computes if of == opposite], number)


def _misplaced(
    promise: Expectations, passed: GraphAnalysis, starts: list[int], at: tuple[Direction, str], places: list[int], what: str
) -> Iterator[str]:
    """A sentence for each of ``places`` that is behind the first of ``starts``, or has other compute between it and that.

    ``at`` is the direction, and the entry whose compute starts at ``starts``.
    """
    direction, other = at
    start = min(starts, default=None)
    if start is None or not places:
        missing = f"{other} computes nothing in {direction}" if start is None else "there is none"
        yield f"{what} right before the compute of {other}: {missing}"
        return
    for place in places:
        between = next((fqn for where, _, fqn in passed.computes if place < where < start), None)
        if place > start:
            yield f"{what} before the compute of {other} starts"
        elif between is not None:
            yield f"{what} right before the compute of {other}: {promise.entry_of.get(between, between)} computes in between"
