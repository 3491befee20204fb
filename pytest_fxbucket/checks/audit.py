"""Does the graph keep what the plan promises? Read from the graph that came out of the pass, without any golden.

Entries: each is one launch for each direction, kind, group and dtype, with exactly its parameters in the layout asked for.
Schedule: prefetch depth, deferred reduction waits, overlap with compute. Numbers: dtypes, and nothing squeezed on the way.
Around it: compute reads what it read before the pass, and there is no launch that the graph before did not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promise import DIRECTIONS, Promise, dtype_name, of_kind, some, times
from pytest_fxbucket.checks.promised_overlap import overlap_problems
from pytest_fxbucket.graph.contents import EXACT
from pytest_fxbucket.graph.movement import MANTISSA_BITS

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.graph.reading import Bucket, Direction, Member, Reading

__all__ = ["Promise", "audit"]

_VERB = {"all_gather": "gathered", "reduce_scatter": "reduced"}


def audit(promise: Promise, captured: Reading, passed: Reading) -> list[str]:
    """Everything that ``passed`` does not keep, one sentence each; ``captured`` is the graph before the pass."""
    if captured.problems:
        return [f"the graph before the pass cannot be read: {problem}" for problem in captured.problems]
    found = [f"the graph cannot be followed: {problem}" for problem in passed.problems]
    for direction in DIRECTIONS:
        for kind in ("all_gather", "reduce_scatter"):
            found += _members(promise, captured, passed, direction, kind)
    found += _others(promise, captured, passed)
    found += _resharding(promise, captured, passed)
    found += _numbers(promise, captured, passed)
    found += _sizes(captured, passed)
    found += overlap_problems(promise, captured, passed)
    if not passed.problems:
        found += _readers(captured, passed)
    return list(dict.fromkeys(found))


def _members(promise: Promise, captured: Reading, passed: Reading, direction: Direction, kind: str) -> Iterator[str]:
    """Is each group of collectives that the plan merges one launch, whole, in order, and alone?"""
    buckets = of_kind(passed, direction, kind)
    carrying: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        for fqn in bucket.fqns:
            carrying.setdefault(fqn, []).append(bucket)
    for label, members in _expected(promise, captured, direction, kind).items():
        missing = [fqn for fqn in members if fqn not in carrying]
        if missing:
            yield f"{label}: {some(missing)} {'is' if len(missing) == 1 else 'are'} not {_VERB[kind]} in {direction}"
        twice = [fqn for fqn in members if len(carrying.get(fqn, ())) > 1]
        if twice:
            yield f"{label}: {some(twice)} {'is' if len(twice) == 1 else 'are'} {_VERB[kind]} more than once in {direction}"
        launches = list({b.node: b for fqn in members for b in carrying.get(fqn, ())}.values())
        if len(launches) > 1:
            yield f"{label}: {len(launches)} launches, expected 1"
        for bucket in launches if len(launches) == 1 else []:
            yield from _one_launch(promise, bucket, label, members)


def _expected(promise: Promise, captured: Reading, direction: Direction, kind: str) -> dict[str, list[str]]:
    """What each launch of the passed graph must carry, by a label for people; members in the layout asked for."""
    groups: dict[tuple[str, str, str, str, str], list[str]] = {}
    for bucket in of_kind(captured, direction, kind):
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
    foreign = [fqn for fqn in have if fqn not in members]
    if foreign:
        owners = sorted({promise.entry_of.get(fqn, "no entry") for fqn in foreign if fqn})
        names = some([fqn or "something that is no parameter" for fqn in foreign])
        yield f"{label}: its launch also carries {names}{' of ' * bool(owners)}{', '.join(owners)}"
    if len(set(have)) < len(have):
        yield f"{label}: its launch carries {some([fqn for fqn in dict.fromkeys(have) if have.count(fqn) > 1])} twice"
    elif not foreign and set(have) == set(members) and have != list(members):
        at = next(i for i, (x, y) in enumerate(zip(have, members, strict=True)) if x != y)
        yield f"{label}: member {at} of the layout is {have[at]}, expected {members[at]} ({promise.layout} order)"
    offset = 0
    for member in bucket.members:
        if member.offset != offset:
            yield f"{label}: {member.fqn} begins at element {member.offset} of a rank's part, expected {offset}"
            break
        offset += member.numel


def _others(promise: Promise, captured: Reading, passed: Reading) -> Iterator[str]:
    """Launches that carry no parameter and no gradient: as many as before the pass, each of its kind."""
    before, after = (Counter(_describe(b) for b in reading.buckets if not any(b.fqns)) for reading in (captured, passed))
    for what in sorted({*before, *after}):
        if before[what] != after[what]:
            yield f"{what} of no parameter is launched {times(after[what])}, {times(before[what])} before the pass"


def _describe(bucket: Bucket) -> str:
    return f"{bucket.kind}{' ' + bucket.op if bucket.op else ''} of {bucket.numel} elements in {dtype_name(bucket.dtype)}"


def _resharding(promise: Promise, captured: Reading, passed: Reading) -> Iterator[str]:
    if promise.reshard_after_forward:
        kept = [
            fqn
            for bucket in of_kind(passed, "forward", "all_gather")
            if bucket.backward_use is not None
            for fqn in bucket.fqns
            if promise.entry_of.get(fqn)
        ]
        if kept:
            yield f"reshard_after_forward = true, but backward reads forward's gather of {some(list(dict.fromkeys(kept)))}"
    else:
        again = [fqn for bucket in of_kind(passed, "backward", "all_gather") for fqn in bucket.fqns if fqn]
        if again:
            yield f"reshard_after_forward = false, but backward gathers {some(again)} again"


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
            yield f"{bucket.direction} {bucket.kind} of {some(fqns)} {fault}"


def _faults(promise: Promise, bucket: Bucket, member: Member, old: Bucket, old_member: Member) -> Iterator[str]:
    wanted = _dtype(promise, bucket, member.fqn) or old.dtype
    if bucket.dtype != wanted:
        yield f"is launched in {dtype_name(bucket.dtype)}, expected {dtype_name(wanted)}"
    elif member.precision < old_member.precision:
        yield f"is squeezed through {_through(member.precision)} on its way, expected {dtype_name(wanted)}"
    if bucket.op != old.op:
        yield f"reduces by {bucket.op}, expected {old.op}"
    if bucket.group != old.group:
        yield "runs on another process group than before the pass"


def _sizes(captured: Reading, passed: Reading) -> Iterator[str]:
    """Does each launch carry as many elements as its members had, and nothing to fill up?"""
    alone = {(b.direction, b.kind, b.members[0].fqn): b.numel for b in captured.buckets if len(b.members) == 1}
    for bucket in passed.buckets:
        sizes = [alone.get((bucket.direction, bucket.kind, fqn)) for fqn in bucket.fqns if fqn]
        wanted = sum(size for size in sizes if size is not None)
        if sizes and None not in sizes and all(bucket.fqns) and wanted != bucket.numel:
            what = f"{bucket.direction} {bucket.kind} of {some(bucket.fqns)}"
            yield f"{what} moves {bucket.numel} elements, its members have {wanted}"


def _readers(captured: Reading, passed: Reading) -> Iterator[str]:
    """Does compute read the parameters, and make the gradients, that it did before the pass?"""
    for direction in DIRECTIONS:
        old, new = ([fqn for _, of, fqn in reading.computes if of == direction] for reading in (captured, passed))
        before, after = Counter(old), Counter(new)
        for fqn in sorted({*before, *after}):
            if before[fqn] != after[fqn]:
                yield f"{direction} compute uses {fqn} {times(after[fqn])}, {times(before[fqn])} before the pass"
        if before == after and old != new:
            was, now = next((x, y) for x, y in zip(old, new, strict=True) if x != y)
            yield (
                f"{direction} compute uses {now} where it used {was} before the pass: two members are swapped, or compute moved"
            )


def _dtype(promise: Promise, bucket: Bucket, fqn: str) -> torch.dtype | None:
    if bucket.kind == "all_gather":
        return promise.param_dtype or promise.own_dtype.get(fqn)
    return promise.reduce_dtype


def _through(bits: int) -> str:
    names = [dtype_name(dtype) for dtype, size in MANTISSA_BITS.items() if size == bits]
    return names[0] if names and bits != EXACT else f"{bits} bits"
