"""Schedules written by hand in a few words."""

from __future__ import annotations

from typing import cast

from pytest_fxbucket.golden.schedule import Event, NamedBucket, Schedule
from pytest_fxbucket.golden.text import golden_text
from pytest_fxbucket.step.roles import Direction

KINDS = {"ag": "all_gather", "rs": "reduce_scatter", "ar": "all_reduce"}


def bucket(entry: str, *members: str, kind: str = "ag", direction: str = "forward", number: int = 1) -> NamedBucket:
    """A bucket of ``entry`` with 4 float32 elements of each of its ``members`` on each of 4 ranks; ``/`` begins a whole FQN."""
    op = "" if kind == "ag" else "avg"
    held = tuple((member[1:] if member[0] == "/" else f"{entry}.{member}", "4") for member in members)
    where = cast("Direction", direction)
    return NamedBucket(where, KINDS[kind], entry, number, "float32", 64 * len(held), "dp_shard", op, held)


def events(text: str, direction: str = "forward") -> tuple[Event, ...]:
    """``L ag a, W ag a, C a, U a``: a launch, a wait, compute, an update."""
    what = {"L": "launch", "W": "wait", "C": "compute", "U": "update"}
    found = []
    for one in filter(None, map(str.strip, text.split(","))):
        letter, _, label = one.partition(" ")
        kind, _, entry = label.partition(" ")
        name = f"{KINDS[kind]} {entry}" if letter in "LW" else label
        found.append(Event(cast("Direction", direction), what[letter], name))
    return tuple(found)


def body(schedule: Schedule) -> str:
    """The golden's body."""
    return golden_text("x.toml", [], {"joint": schedule})
