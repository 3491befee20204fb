"""Reading a golden's text back; and pairing the buckets of two schedules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pytest_fxbucket.golden.schedule import NAMELESS, PADDING, NamedBucket, direction_of
from pytest_fxbucket.golden.text import unfold, unfold_alike

_BUCKET = re.compile(
    r"^  (?P<direction>\w+) (?P<kind>\w+)(?: #(?P<number>\d+))?: (?P<count>\d+) members?, (?P<dtype>[\w ]+), "
    r"(?P<bytes>\d+) bytes, (?:(?P<op>\w+(?: \d+)?) over )?(?P<dims>.*)$"
)
_MEMBER = re.compile(r"^(?P<fqn>.+?) (?P<size>\d+(?: [a-z]\w*)?)$")


@dataclass(slots=True)
class ReadGraph:
    """One graph, read back from the text."""

    events: dict[str, list[str]] = field(default_factory=dict)
    """By section; ``launch all_gather layers.0``."""
    buckets: list[NamedBucket] = field(default_factory=list)


@dataclass(slots=True)
class ReadGolden:
    """A whole golden, read back."""

    header: list[str] = field(default_factory=list)
    graphs: dict[str, ReadGraph] = field(default_factory=dict)
    """By phase of the step."""


def read_back(text: str) -> ReadGolden:
    """Read a golden's body. Lines that do not belong in a golden are skipped: the diff of the texts shows them."""
    # Two steps: lines are first sorted into their sections, since a ``repeat`` block is written out only as a whole.
    golden = ReadGolden()
    graph, section = ReadGraph(), list[str]()
    sections: list[tuple[ReadGraph, str, list[str]]] = []
    for line in text.split("\n"):
        if line.startswith("graph "):
            graph = golden.graphs.setdefault(line.removeprefix("graph "), ReadGraph())
            section = []
        elif (line == "buckets" or direction_of(line)) and golden.graphs:
            section = []
            sections.append((graph, line, section))
        elif golden.graphs:
            section.append(line)
        elif line:
            golden.header.append(line)
    for graph, name, lines in sections:
        if name == "buckets":
            graph.buckets += _buckets(lines)
        else:
            # The columns of :func:`~pytest_fxbucket.golden.text.schedule_lines`: indent 2, the event's kind in 7, its label.
            graph.events[name] = [f"{line[2:9].strip()} {line[10:]}" for line in unfold(lines) if line]
    return golden


def _buckets(lines: Sequence[str]) -> Iterator[NamedBucket]:
    block: list[str] = []
    # The empty line behind all others ends the last block.
    for line in [*(line[2:] for line in lines if line.startswith("  ")), ""]:
        if not line.startswith(" ") and block:
            for one in unfold_alike(tuple(block)):
                yield from _of_entry(one[0], unfold(one[1:]))
            block = []
        block.append(line)


def _of_entry(entry: str, lines: Sequence[str]) -> Iterator[NamedBucket]:
    # Members are written once, below the last of the bucket lines in a row that share them: those lines wait for them.
    waiting: list[re.Match[str]] = []
    members: list[tuple[str, str]] = []
    for line in [*lines, "  "]:
        if line.startswith("    "):
            members.append(pair(line.strip()))
            continue
        if members:
            yield from (_bucket(match, entry, tuple(members)) for match in waiting)
            waiting, members = [], []
        match = _BUCKET.match(line)
        # No line of a member will follow that ends the waiting of such a bucket.
        if match and match["count"] == "0":
            yield _bucket(match, entry, ())
        elif match:
            waiting.append(match)


def _bucket(match: re.Match[str], entry: str, members: tuple[tuple[str, str], ...]) -> NamedBucket:
    number, size, op = int(match["number"] or 1), int(match["bytes"]), match["op"] or ""
    return NamedBucket(match["direction"], match["kind"], entry, number, match["dtype"], size, match["dims"], op, members)


def pair(member: str) -> tuple[str, str]:
    """FQN and size of a member's line."""
    match = _MEMBER.match(member)
    return (match["fqn"], match["size"]) if match else (member, "")


# Pairing the buckets of two schedules: by their members first, then by name.


@dataclass(frozen=True, slots=True)
class PairedBuckets:
    """The buckets of two schedules: each is in a pair, or lost, or new."""

    pairs: tuple[tuple[NamedBucket, NamedBucket], ...]
    """In the order of the old ones."""
    lost: tuple[NamedBucket, ...]
    new: tuple[NamedBucket, ...]


def paired(old: Sequence[NamedBucket], new: Sequence[NamedBucket]) -> PairedBuckets:
    """Pair buckets of the same direction and kind that share most members, then the rest by equal names."""
    # Greedy from the best candidate down; a bucket is paired once. Names alone would not do: a bucket that is split or merged
    # renumbers those of its entry that follow, and every one of them would be said to have changed.
    taken_old: dict[int, int] = {}
    taken_new: set[int] = set()
    for a, b in _candidates(old, new):
        if a not in taken_old and b not in taken_new:
            taken_old[a] = b
            taken_new.add(b)
    by_name = {bucket.name: b for b, bucket in enumerate(new) if b not in taken_new}
    for a, bucket in enumerate(old):
        if a not in taken_old and bucket.name in by_name:
            taken_old[a] = by_name.pop(bucket.name)
            taken_new.add(taken_old[a])
    return PairedBuckets(
        pairs=tuple((old[a], new[b]) for a, b in sorted(taken_old.items())),
        lost=tuple(bucket for a, bucket in enumerate(old) if a not in taken_old),
        new=tuple(bucket for b, bucket in enumerate(new) if b not in taken_new),
    )


def carried(bucket: NamedBucket) -> dict[str, str]:
    """Size of each member by FQN, without padding; the second member of one name is ``name (2)``."""
    found: dict[str, str] = {}
    for fqn, size in bucket.members:
        if fqn != PADDING:
            name, count = fqn, 1
            while name in found:
                count += 1
                name = f"{fqn} ({count})"
            found[name] = size
    return found


def known(bucket: NamedBucket) -> list[str]:
    """Members by which a bucket can be recognized: all that are parameters."""
    return [fqn for fqn in carried(bucket) if not fqn.startswith(NAMELESS)]


def _candidates(old: Sequence[NamedBucket], new: Sequence[NamedBucket]) -> list[tuple[int, int]]:
    """Pairs that share a member, the best first: most members shared, then fewest members in both, then the same name."""
    holders: dict[tuple[str, str, str], list[int]] = {}
    for b, bucket in enumerate(new):
        for fqn in known(bucket):
            holders.setdefault((bucket.direction, bucket.kind, fqn), []).append(b)
    shared: dict[tuple[int, int], int] = {}
    for a, bucket in enumerate(old):
        for fqn in known(bucket):
            for b in holders.get((bucket.direction, bucket.kind, fqn), ()):
                shared[a, b] = shared.get((a, b), 0) + 1

    def rank(pair: tuple[int, int]) -> tuple[int, int, bool, int, int]:
        a, b = pair
        return -shared[pair], len(old[a].members) + len(new[b].members), old[a].name != new[b].name, a, b

    return sorted(shared, key=rank)
