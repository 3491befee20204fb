"""Does communication hide behind compute as the plan promises? Prefetch depth, exposed gathers, deferred reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promise import DIRECTIONS, Promise, of_kind, some

if TYPE_CHECKING:
    from pytest_fxbucket.graph.reading import Bucket, Direction, Reading


def overlap_problems(promise: Promise, captured: Reading, passed: Reading) -> Iterator[str]:
    """What ``passed`` does not keep of the promised schedule, one sentence each; ``captured`` is the graph before the pass."""
    yield from _prefetching(promise, passed)
    yield from _exposed(promise, captured, passed)
    yield from _deferring(promise, passed)


def _prefetching(promise: Promise, passed: Reading) -> Iterator[str]:
    forward_waits = [b.wait for b in of_kind(passed, "forward", "all_gather") if b.wait is not None]
    for direction in DIRECTIONS:
        stages = _stages(promise, passed, direction, "all_gather", lambda b: b.first_use or 0)
        names = list(stages)
        waits = [min(b.wait for b in stage if b.wait is not None) for stage in stages.values()]
        for index, name in enumerate(names):
            launches = [bucket.launch for bucket in stages[name]]
            what = f"entry {name}, {direction} all_gather"
            if index == 0:
                if direction == "backward" and forward_waits and min(launches) < max(forward_waits):
                    yield f"{what} is launched in forward, before its last wait"
                continue
            ahead = max(0, index - promise.prefetch)
            if promise.prefetch and max(launches) > waits[ahead]:
                yield (f"{what} is launched after the wait for {names[ahead]}: prefetch = {promise.prefetch} is not reached")
            early = index - promise.prefetch - 1
            if early >= 0 and min(launches) < waits[early]:
                yield f"{what} is launched before the wait for {names[early]}: earlier than prefetch = {promise.prefetch}"


def _exposed(promise: Promise, captured: Reading, passed: Reading) -> Iterator[str]:
    """A gather may not be waited for before compute that ran before its members' first wait until now."""
    waits = {(b.direction, m.fqn): b.wait for b in captured.buckets if b.kind == "all_gather" for m in b.members}
    for bucket in passed.buckets:
        old = [w for fqn in bucket.fqns if (w := waits.get((bucket.direction, fqn))) is not None]
        entry = next((e for fqn in bucket.fqns if (e := promise.entry_of.get(fqn))), "")
        if bucket.kind != "all_gather" or bucket.wait is None or not old or not entry:
            continue
        before, now = _numbered_before(captured, min(old)), _numbered_before(passed, bucket.wait)
        ahead = (before - now) & _numbered_before(passed, passed.last)
        if ahead:
            names = dict.fromkeys(promise.entry_of.get(fqn, fqn) for _, fqn, _ in sorted(ahead))
            what = f"entry {entry}, {bucket.direction} all_gather"
            yield f"{what} is waited for before {some(list(names))} computes, which used to hide it: it is exposed"


def _numbered_before(reading: Reading, position: int) -> set[tuple[str, str, int]]:
    """(direction, FQN, nth) of every compute before ``position``."""
    seen: Counter[tuple[str, str]] = Counter()
    found: set[tuple[str, str, int]] = set()
    for where, direction, fqn in reading.computes:
        if where < position:
            found.add((direction, fqn, seen[direction, fqn]))
            seen[direction, fqn] += 1
    return found


def _deferring(promise: Promise, passed: Reading) -> Iterator[str]:
    stages = _stages(promise, passed, "backward", "reduce_scatter", lambda b: b.launch)
    in_order = sorted(stages.items(), key=lambda item: max(bucket.launch for bucket in item[1]))
    for (name, stage), (following, next_stage) in pairwise(in_order):
        waits = [bucket.wait for bucket in stage if bucket.wait is not None]
        what = f"entry {name}, backward reduce_scatter"
        if promise.defer_reduce and waits and min(waits) < max(bucket.launch for bucket in next_stage):
            yield f"{what} is waited for before {following} launches its reduction: it is not deferred"
        if not promise.defer_reduce and waits and max(waits) > max(bucket.launch for bucket in next_stage):
            yield f"{what} is waited for after {following} launches its reduction, but defer_reduce = false"


def _stages(
    promise: Promise, reading: Reading, direction: Direction, kind: str, when: Callable[[Bucket], int]
) -> dict[str, list[Bucket]]:
    """Planned buckets by entry, entries in order of ``when``; a launch of several entries counts for each."""
    stages: dict[str, list[Bucket]] = {}
    for bucket in sorted(of_kind(reading, direction, kind), key=when):
        for entry in dict.fromkeys(promise.entry_of.get(fqn, "") for fqn in bucket.fqns):
            if entry and bucket.wait is not None:
                stages.setdefault(entry, []).append(bucket)
    return stages
