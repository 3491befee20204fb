"""The text of a golden, read back: its header, and of each graph the events and buckets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pytest_fxbucket.schedule.alike import unfold_alike
from pytest_fxbucket.schedule.folding import unfold
from pytest_fxbucket.schedule.sections import direction_of

_BUCKET = re.compile(
    r"^  (?P<direction>\w+) (?P<kind>\w+)(?: #(?P<number>\d+))?: (?P<count>\d+) members?, (?P<dtype>[\w ]+), "
    r"(?P<bytes>\d+) bytes, (?:(?P<op>\w+(?: \d+)?) over )?(?P<dims>.*)$"
)
_MEMBER = re.compile(r"^(?P<fqn>.+?) (?P<size>\d+(?: [a-z]\w*)?)$")


@dataclass(frozen=True, slots=True)
class ReadBucket:
    """A bucket as the text has it."""

    direction: str
    label: str
    kind: str
    entry: str
    dtype: str
    bytes: int
    dims: str
    op: str
    members: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """``forward all_gather layers.0``."""
        return f"{self.direction} {self.label}"


@dataclass(slots=True)
class ReadGraph:
    """One graph as the text has it."""

    events: dict[str, list[str]] = field(default_factory=dict)
    """By section; ``launch all_gather layers.0``."""
    buckets: list[ReadBucket] = field(default_factory=list)


@dataclass(slots=True)
class ReadGolden:
    """The whole text."""

    header: list[str] = field(default_factory=list)
    graphs: dict[str, ReadGraph] = field(default_factory=dict)
    """By phase of the step."""


def read_back(text: str) -> ReadGolden:
    """Read a golden's body. What is no line of one is passed over: the text's diff shows it."""
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
            graph.events[name] = [f"{line[2:9].strip()} {line[10:]}" for line in unfold(lines) if line]
    return golden


def _buckets(lines: Sequence[str]) -> Iterator[ReadBucket]:
    block: list[str] = []
    for line in [*(line[2:] for line in lines if line.startswith("  ")), ""]:
        if not line.startswith(" ") and block:
            for one in unfold_alike(tuple(block)):
                yield from _of_entry(one[0], unfold(one[1:]))
            block = []
        block.append(line)


def _of_entry(entry: str, lines: Sequence[str]) -> Iterator[ReadBucket]:
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
        if match and match["count"] == "0":
            yield _bucket(match, entry, ())
        elif match:
            waiting.append(match)


def _bucket(match: re.Match[str], entry: str, members: tuple[tuple[str, str], ...]) -> ReadBucket:
    number = f" #{match['number']}" if match["number"] else ""
    label = f"{match['kind']} {entry}{number}"
    dims, op = match["dims"], match["op"] or ""
    return ReadBucket(match["direction"], label, match["kind"], entry, match["dtype"], int(match["bytes"]), dims, op, members)


def pair(member: str) -> tuple[str, str]:
    """FQN and size of a member's line."""
    match = _MEMBER.match(member)
    return (match["fqn"], match["size"]) if match else (member, "")
