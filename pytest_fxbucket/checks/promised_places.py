"""Do launches and waits that the user placed by hand stand there: right before an entry's compute?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promise import DIRECTIONS, Promise, by_round, of_round
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.microbatches import in_rounds
from pytest_fxbucket.graph.microbatches import of_round as places_of

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Direction
    from pytest_fxbucket.graph.buckets import Reading


def placing_problems(promise: Promise, passed: Reading) -> Iterator[str]:
    """Launches of ``launch_at``, and waits of ``wait_before``, that do not stand right before the compute they name."""
    for direction in DIRECTIONS:
        here = [bucket for bucket in passed.buckets if bucket.direction == direction]
        for entry, other in sorted(promise.launch_at.get(direction, {}).items()):
            gathers = [b for b in here if b.kind == "all_gather" and _is_of(promise, b.fqns, entry)]
            for number, buckets in by_round(gathers).items() or {0: gathers}.items():
                what = f"entry {entry}, {direction} all_gather{of_round(number)} is not launched"
                starts = starts_of(promise, passed, direction, other, number)
                yield from _misplaced(promise, passed, starts, (direction, other), [b.launch for b in buckets], what)
        for entry, other in sorted(promise.wait_before.get(direction, {}).items()):
            reductions = [b for b in here if b.kind in REDUCTIONS and _is_of(promise, b.fqns, entry)]
            last = max((bucket.level for bucket in reductions), default=0)
            waits = [bucket.wait for bucket in reductions if bucket.wait is not None and bucket.level == last]
            what = f"entry {entry}, {direction} reduction is not waited for"
            starts = starts_of(promise, passed, direction, other, None)
            yield from _misplaced(promise, passed, starts, (direction, other), waits, what)


def _is_of(promise: Promise, fqns: tuple[str, ...], entry: str) -> bool:
    return any(promise.entry_of.get(fqn) == entry for fqn in fqns)


def starts_of(promise: Promise, reading: Reading, direction: Direction, entry: str, number: int | None) -> list[int]:
    """Where ``entry`` computes in ``direction``, ascending, in the round ``number``; None: the last."""
    own = [where for where, of, fqn in reading.computes if of == direction and promise.entry_of.get(fqn) == entry]
    opposite = "backward" if direction == "forward" else "forward"
    return places_of(in_rounds(own, [where for where, of, _ in reading.computes if of == opposite]), number)


def _misplaced(
    promise: Promise, passed: Reading, starts: list[int], at: tuple[Direction, str], places: list[int], what: str
) -> Iterator[str]:
    """A sentence for each of ``places`` that is behind the first of ``starts``, or has other compute before that.

    ``at`` is the direction, and the entry that starts there.
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
