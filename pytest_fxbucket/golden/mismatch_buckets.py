"""What became of buckets, in words: lost, new, with other members, bytes, dtypes or layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from pytest_fxbucket.golden.read_back import PairedBuckets, carried, known
from pytest_fxbucket.golden.schedule import NAMELESS, PADDING, NamedBucket
from pytest_fxbucket.words import plural

_FEW = 4
"""Up to this many members have a sentence each; more are summed up in one."""

Holders = Mapping[tuple[str, str, str], NamedBucket]
"""Bucket by direction, kind and a member's FQN."""


def bucket_sentences(paired: PairedBuckets) -> Iterator[str]:
    """Sentences on all buckets: first those that are gone, then new ones, then those that changed."""
    # ``settled`` has the names of buckets that need no sentence of their own, since one on another bucket names them. Sentences
    # on lost buckets and on pairs fill it, so those on pairs are made before the new buckets are said, though they come last.
    now = _holders([*paired.new, *(new for _, new in paired.pairs)])
    before = _holders([*paired.lost, *(old for old, _ in paired.pairs)])
    counted = {(one.direction, one.kind, one.entry) for one in (*paired.lost, *paired.new)}
    settled: set[str] = set()
    for old in paired.lost:
        yield _lost(old, now, settled)
    changed = [
        sentence
        for old, new in paired.pairs
        for sentence in (*_renumbered(old, new, counted), *_changes(old, new, paired.new, now, before, settled))
    ]
    for new in paired.new:
        if new.name not in settled:
            yield _new(new, before)
    yield from dict.fromkeys(changed)


def _holders(buckets: Sequence[NamedBucket]) -> dict[tuple[str, str, str], NamedBucket]:
    return {(bucket.direction, bucket.kind, fqn): bucket for bucket in buckets for fqn in known(bucket)}


def _lost(old: NamedBucket, now: Holders, settled: set[str]) -> str:
    """What became of a bucket that is gone; its name goes into ``settled`` if the sentence says where its members are now."""
    into = {now[key].name for fqn in carried(old) if (key := (old.direction, old.kind, fqn)) in now}
    if len(into) == 1 and all((old.direction, old.kind, fqn) in now for fqn in carried(old)):
        settled.add(old.name)
        return f"bucket {old.name} ({_count(old)}) is gone: {into.pop()} carries its members"
    return f"bucket lost: {old.name} ({_count(old)})"


def _new(new: NamedBucket, before: Holders) -> str:
    sources = {before[key].name for fqn in carried(new) if (key := (new.direction, new.kind, fqn)) in before}
    said = f", with members of {' and '.join(sorted(sources))}" if 0 < len(sources) < 4 else ""
    return f"bucket new: {new.name} ({_count(new)}{said})"


def _renumbered(old: NamedBucket, new: NamedBucket, counted: Collection[tuple[str, str, str]]) -> Iterator[str]:
    """A sentence on a bucket that has another number, unless a bucket of the same series is lost or new.

    ``counted`` has direction, kind and entry of those series: there the change of a number is only a consequence.
    """
    is_counted_anew = (new.direction, new.kind, new.entry) in counted or (old.direction, old.kind, old.entry) in counted
    if old.entry == new.entry and old.label != new.label and not is_counted_anew:
        yield f"bucket {old.name} is now {new.name}"


def _changes(
    old: NamedBucket, new: NamedBucket, others: Sequence[NamedBucket], now: Holders, before: Holders, settled: set[str]
) -> Iterator[str]:
    """Sentences on one bucket. Buckets in ``settled`` are not named again; new ones that are named here are put into it."""
    alone = _launched_alone(old, new, others, now)
    settled |= {bucket.name for bucket in alone.values()}
    members, brought = carried(old), carried(new)
    # Pairing prefers buckets of few members, so ``new`` is one of the launches of one member, too.
    if alone and len(alone) == len(members) - 1:
        settled.add(new.name)
        yield f"{old.name} is no longer bucketed: its {len(members)} members are launched one by one"
        return
    yield from _each(
        alone,
        [f"{fqn} is no longer bucketed: it left {old.name} and is launched alone" for fqn in alone],
        f"are no longer bucketed: they left {old.name} and are launched one by one",
    )
    if old.label != new.label and old.entry != new.entry:
        yield f"bucket {old.name} is now {new.name}"
    renamed = dict(_renamed(old, new, now, before))
    yield from (f"{fqn} is now called {name}" for fqn, name in renamed.items())
    gone = [fqn for fqn in members if fqn not in brought and fqn not in alone and fqn not in renamed]
    yield from _moved(f"{new.name} lost", "to", gone, old, now, settled)
    gained = [fqn for fqn in brought if fqn not in members and fqn not in renamed.values()]
    yield from _moved(f"{new.name} gained", "from", gained, old, before, settled)
    resized = [fqn for fqn, size in brought.items() if members.get(fqn, size) != size]
    sizes = [f"{fqn} of {new.name} changed: {members[fqn]} -> {brought[fqn]} elements" for fqn in resized]
    yield from _each(resized, sizes, f"of {new.name} have other sizes")
    yield from _facts(old, new, has_other_members=bool(gone or gained or alone))
    yield from _layout(old, new)


def _renamed(old: NamedBucket, new: NamedBucket, now: Holders, before: Holders) -> Iterator[tuple[str, str]]:
    """(old FQN, new FQN) of members with the place and size of an old one, if the old FQN is gone and the new one is new."""
    members, brought = list(carried(old).items()), list(carried(new).items())
    if len(members) != len(brought):
        return
    for (fqn, size), (name, other) in zip(members, brought, strict=True):
        has_names = not fqn.startswith(NAMELESS) and not name.startswith(NAMELESS)
        is_gone = has_names and (old.direction, old.kind, fqn) not in now
        if size == other and is_gone and (old.direction, old.kind, name) not in before:
            yield fqn, name


def _each(fqns: Collection[str], sentences: Sequence[str], behind: str) -> Iterator[str]:
    """A sentence each for a few members; for many, one that names the first and last of them, with ``behind`` as its end."""
    if len(sentences) <= _FEW:
        yield from sentences
    else:
        yield f"{_several(list(fqns))} {behind}"


def _launched_alone(old: NamedBucket, new: NamedBucket, others: Sequence[NamedBucket], now: Holders) -> dict[str, NamedBucket]:
    """Members of ``old`` that new launches carry alone, with those launches; ``others`` are all new buckets."""
    fresh = {id(bucket) for bucket in others}
    found = {}
    for fqn in carried(old):
        holder = now.get((old.direction, old.kind, fqn))
        is_fresh = holder is not None and id(holder) in fresh and holder.entry == old.entry
        if holder is not None and is_fresh and len(carried(holder)) == 1 and fqn not in carried(new):
            found[fqn] = holder
    return found


def _moved(what: str, way: str, fqns: Sequence[str], old: NamedBucket, holders: Holders, settled: set[str]) -> Iterator[str]:
    """One sentence for all members that came from, or went to, one bucket; one for the members that no other bucket has."""
    by_holder: dict[str, list[str]] = {}
    for fqn in fqns:
        holder = holders.get((old.direction, old.kind, fqn))
        by_holder.setdefault(holder.name if holder is not None else "", []).append(fqn)
    for name, moved in by_holder.items():
        if name in settled:
            continue
        # Many members end in a comma before what follows, and without another bucket nothing follows.
        yield f"{what} {_several(moved)} {way} {name}" if name else f"{what} {_several(moved)}".rstrip(",")


def _several(fqns: Sequence[str]) -> str:
    if len(fqns) < 3:
        return " and ".join(fqns)
    return f"{len(fqns)} members, {fqns[0]} ... {fqns[-1]},"


def _facts(old: NamedBucket, new: NamedBucket, *, has_other_members: bool) -> Iterator[str]:
    size = f" ({old.bytes} -> {new.bytes} bytes)" if old.bytes != new.bytes else ""
    if old.dtype != new.dtype:
        yield f"dtype of {new.name} changed: {old.dtype} -> {new.dtype}{size}"
    if old.dims != new.dims:
        yield f"group of {new.name} changed: {old.dims} -> {new.dims}"
    if old.op != new.op:
        yield f"reduction of {new.name} changed: {old.op or 'none'} -> {new.op or 'none'}"
    if size and old.dtype == new.dtype:
        why = " with its members" if has_other_members else ""
        yield f"bytes of {new.name} changed{why}: {old.bytes} -> {new.bytes}"


def _layout(old: NamedBucket, new: NamedBucket) -> Iterator[str]:
    # Members that came or went have sentences of their own: only the order among those that stayed is compared.
    before, after = list(carried(old)), list(carried(new))
    kept_before, kept_after = [f for f in before if f in after], [f for f in after if f in before]
    at = next((i for i, (x, y) in enumerate(zip(kept_before, kept_after, strict=True)) if x != y), None)
    if at is not None:
        yield f"byte layout of {new.name} changed: {kept_after[at]} stands where {kept_before[at]} stood"
    elif before == after and _padding(old) != _padding(new):
        yield f"byte layout of {new.name} changed: padding of {_padding(old) or 'none'} -> {_padding(new) or 'none'}"


def _padding(bucket: NamedBucket) -> str:
    """Where padding stands, and how much."""
    places = [
        f"{size} behind {bucket.members[at - 1][0]}" if at else size
        for at, (fqn, size) in enumerate(bucket.members)
        if fqn == PADDING
    ]
    return ", ".join(places)


def _count(bucket: NamedBucket) -> str:
    count = len(carried(bucket))
    return f"{count} {plural('member', count)}"
