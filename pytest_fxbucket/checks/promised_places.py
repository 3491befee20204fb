"""Do launches and waits that the user placed by hand stand there: right before an entry's compute?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promise import DIRECTIONS, Promise

if TYPE_CHECKING:
    from pytest_fxbucket.graph.reading import Direction, Reading


def placing_problems(promise: Promise, passed: Reading) -> Iterator[str]:
    """Launches of ``launch_at``, and waits of ``wait_before``, that do not stand right before the compute they name."""
    for direction in DIRECTIONS:
        here = [bucket for bucket in passed.buckets if bucket.direction == direction]
        for entry, other in sorted(promise.launch_at.get(direction, {}).items()):
            launches = [b.launch for b in here if b.kind == "all_gather" and _is_of(promise, b.fqns, entry)]
            what = f"entry {entry}, {direction} all_gather is not launched"
            yield from _misplaced(promise, passed, direction, other, launches, what)
        for entry, other in sorted(promise.wait_before.get(direction, {}).items()):
            reductions = [b for b in here if b.kind in ("reduce_scatter", "all_reduce") and _is_of(promise, b.fqns, entry)]
            waits = [bucket.wait for bucket in reductions if bucket.wait is not None]
            what = f"entry {entry}, {direction} reduction is not waited for"
            yield from _misplaced(promise, passed, direction, other, waits, what)


def _is_of(promise: Promise, fqns: tuple[str, ...], entry: str) -> bool:
    return any(promise.entry_of.get(fqn) == entry for fqn in fqns)


def _misplaced(
    promise: Promise, passed: Reading, direction: Direction, other: str, places: list[int], what: str
) -> Iterator[str]:
    """A sentence for each of ``places`` that is behind the start of ``other``'s compute, or has other compute before it."""
    starts = [where for where, of, fqn in passed.computes if of == direction and promise.entry_of.get(fqn) == other]
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
