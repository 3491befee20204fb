"""Does the graph keep what the plan promises? Read from the graph that came out of the pass, without any golden.

Entries: each is one launch for each direction, kind, group and dtype, with exactly its parameters in the layout asked for.
Schedule: prefetch depth, deferred reduction waits, overlap with compute. Numbers: dtypes, and nothing squeezed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.contents import EXACT
from pytest_fxbucket.graph.movement import MANTISSA_BITS

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.graph.reading import Bucket, Direction, Member, Reading

_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
_VERB = {"all_gather": "gathered", "reduce_scatter": "reduced"}


@dataclass(frozen=True, slots=True)
class Promise:
    """What a plan promises of every graph."""

    entry_of: Mapping[str, str]
    """FQN to entry, planned parameters only."""
    registration: tuple[str, ...]
    own_dtype: Mapping[str, torch.dtype]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    merged: bool
    layout: str
    prefetch: int
    defer_reduce: bool
    reshard_after_forward: bool


def audit(promise: Promise, captured: Reading, passed: Reading) -> list[str]:
    """Everything that ``passed`` does not keep, one sentence each; ``captured`` is the graph before the pass."""
    if captured.problems:
        return [f"the graph before the pass cannot be read: {problem}" for problem in captured.problems]
    found = [f"the graph cannot be followed: {problem}" for problem in passed.problems]
    for direction in _DIRECTIONS:
        for kind in ("all_gather", "reduce_scatter"):
            found += _members(promise, captured, passed, direction, kind)
    found += _resharding(promise, captured, passed)
    found += _numbers(promise, captured, passed)
    found += _prefetching(promise, passed)
    found += _deferring(promise, passed)
    return list(dict.fromkeys(found))


def _members(promise: Promise, captured: Reading, passed: Reading, direction: Direction, kind: str) -> Iterator[str]:
    """Is each group of collectives that the plan merges one launch, whole, in order, and alone?"""
    buckets = _of(passed, direction, kind)
    carrying: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        for fqn in bucket.fqns:
            carrying.setdefault(fqn, []).append(bucket)
    for label, members in _expected(promise, captured, direction, kind).items():
        missing = [fqn for fqn in members if fqn not in carrying]
        if missing:
            yield f"{label}: {_some(missing)} {'is' if len(missing) == 1 else 'are'} not {_VERB[kind]} in {direction}"
        twice = [fqn for fqn in members if len(carrying.get(fqn, ())) > 1]
        if twice:
            yield f"{label}: {_some(twice)} {'is' if len(twice) == 1 else 'are'} {_VERB[kind]} more than once in {direction}"
        launches = list({b.node: b for fqn in members for b in carrying.get(fqn, ())}.values())
        if len(launches) > 1:
            yield f"{label}: {len(launches)} launches, expected 1"
        for bucket in launches if len(launches) == 1 else []:
            yield from _one_launch(promise, bucket, label, members)


def _expected(promise: Promise, captured: Reading, direction: Direction, kind: str) -> dict[str, list[str]]:
    """What each launch of the passed graph must carry, by a label for people; members in the layout asked for."""
    groups: dict[tuple[str, str, str, str, str], list[str]] = {}
    for bucket in _of(captured, direction, kind):
        for fqn in bucket.fqns:
            entry = promise.entry_of.get(fqn)
            key = (entry or fqn, "" if entry and promise.merged else fqn, str(bucket.dtype), bucket.group, bucket.op)
            groups.setdefault(key, []).append(fqn)
    several = [key[0] for key in groups]
    expected: dict[str, list[str]] = {}
    for key, members in groups.items():
        if promise.layout == "registration":
            members = sorted(members, key=promise.registration.index)
        detail = f" {key[2].removeprefix('torch.')}" if several.count(key[0]) > 1 and not key[1] else ""
        detail += f" ({key[1]})" if key[1] and key[1] != key[0] else ""
        expected[f"entry {key[0]}, {direction} {kind}{detail}"] = members
    return expected


def _one_launch(promise: Promise, bucket: Bucket, label: str, members: Sequence[str]) -> Iterator[str]:
    have = list(bucket.fqns)
    foreign = [fqn or "something that is no parameter" for fqn in have if fqn not in members]
    if foreign:
        owners = sorted({promise.entry_of.get(fqn, "no entry") for fqn in foreign})
        yield f"{label}: its launch also carries {_some(foreign)} of {', '.join(owners)}"
    if len(set(have)) < len(have):
        yield f"{label}: its launch carries {_some([fqn for fqn in dict.fromkeys(have) if have.count(fqn) > 1])} twice"
    elif not foreign and set(have) == set(members) and have != list(members):
        at = next(i for i, (x, y) in enumerate(zip(have, members, strict=True)) if x != y)
        yield f"{label}: member {at} of the layout is {have[at]}, expected {members[at]} ({promise.layout} order)"
    offset = 0
    for member in bucket.members:
        if member.offset != offset:
            yield f"{label}: {member.fqn} begins at element {member.offset} of a rank's part, expected {offset}"
            break
        offset += member.numel


def _resharding(promise: Promise, captured: Reading, passed: Reading) -> Iterator[str]:
    if promise.reshard_after_forward:
        kept = [
            fqn
            for bucket in _of(passed, "forward", "all_gather")
            if bucket.backward_use is not None
            for fqn in bucket.fqns
            if promise.entry_of.get(fqn)
        ]
        if kept:
            yield f"reshard_after_forward = true, but backward reads forward's gather of {_some(list(dict.fromkeys(kept)))}"
    else:
        again = [fqn for bucket in _of(passed, "backward", "all_gather") for fqn in bucket.fqns if fqn]
        if again:
            yield f"reshard_after_forward = false, but backward gathers {_some(again)} again"


def _numbers(promise: Promise, captured: Reading, passed: Reading) -> Iterator[str]:
    """Are dtypes as asked, reductions the same, and is nothing squeezed through fewer bits? One sentence a bucket and fault."""
    before = {(b.direction, b.kind, m.fqn): (b, m) for b in captured.buckets for m in b.members}
    for bucket in passed.buckets:
        faults: dict[str, list[str]] = {}
        for member in bucket.members:
            known = before.get((bucket.direction, bucket.kind, member.fqn))
            for fault in _faults(promise, bucket, member, *known) if known else ():
                faults.setdefault(fault, []).append(member.fqn)
        for fault, fqns in faults.items():
            yield f"{bucket.direction} {bucket.kind} of {_some(fqns)} {fault}"


def _faults(promise: Promise, bucket: Bucket, member: Member, old: Bucket, old_member: Member) -> Iterator[str]:
    wanted = _dtype(promise, bucket, member.fqn) or old.dtype
    if bucket.dtype != wanted:
        yield f"is launched in {_name(bucket.dtype)}, expected {_name(wanted)}"
    elif member.precision < old_member.precision:
        yield f"is squeezed through {_through(member.precision)} on its way, expected {_name(wanted)}"
    if bucket.op != old.op:
        yield f"reduces by {bucket.op}, expected {old.op}"
    if bucket.group != old.group:
        yield "runs on another process group than before the pass"


def _prefetching(promise: Promise, passed: Reading) -> Iterator[str]:
    forward_waits = [b.wait for b in _of(passed, "forward", "all_gather") if b.wait is not None]
    for direction in _DIRECTIONS:
        stages = _stages(promise, passed, direction, "all_gather", lambda b: b.first_use or 0)
        names = list(stages)
        waits = [min(b.wait for b in stage if b.wait is not None) for stage in stages.values()]
        uses = [min(b.first_use or 0 for b in stage) for stage in stages.values()]
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
            if waits[index] < uses[index - 1]:
                yield f"{what} is waited for before {names[index - 1]} computes: nothing hides it, it is exposed"


def _deferring(promise: Promise, passed: Reading) -> Iterator[str]:
    stages = _stages(promise, passed, "backward", "reduce_scatter", lambda b: b.launch)
    for (name, stage), (following, next_stage) in pairwise(stages.items()):
        waits = [bucket.wait for bucket in stage if bucket.wait is not None]
        what = f"entry {name}, backward reduce_scatter"
        if promise.defer_reduce and waits and min(waits) < max(bucket.launch for bucket in next_stage):
            yield f"{what} is waited for before {following} launches its reduction: it is not deferred"
        if not promise.defer_reduce and waits and max(waits) > min(bucket.launch for bucket in next_stage):
            yield f"{what} is waited for after {following} launches its reduction, but defer_reduce = false"


def _stages(
    promise: Promise, reading: Reading, direction: Direction, kind: str, when: Callable[[Bucket], int]
) -> dict[str, list[Bucket]]:
    """Planned buckets by entry, entries in order of ``when``; a launch of several entries counts for each."""
    stages: dict[str, list[Bucket]] = {}
    for bucket in sorted(_of(reading, direction, kind), key=when):
        for entry in dict.fromkeys(promise.entry_of.get(fqn, "") for fqn in bucket.fqns):
            if entry and bucket.wait is not None:
                stages.setdefault(entry, []).append(bucket)
    return stages


def _of(reading: Reading, direction: Direction, kind: str) -> list[Bucket]:
    return [bucket for bucket in reading.buckets if bucket.direction == direction and bucket.kind == kind]


def _dtype(promise: Promise, bucket: Bucket, fqn: str) -> torch.dtype | None:
    if bucket.kind == "all_gather":
        return promise.param_dtype or promise.own_dtype.get(fqn)
    return promise.reduce_dtype


def _through(bits: int) -> str:
    names = [_name(dtype) for dtype, size in MANTISSA_BITS.items() if size == bits]
    return names[0] if names and bits != EXACT else f"{bits} bits"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _some(fqns: Sequence[str]) -> str:
    shown = ", ".join(fqns[:3])
    return shown if len(fqns) <= 3 else f"{shown} and {len(fqns) - 3} more"
