"""Random schedules: their text is read back, is silent beside itself, and tells of each launch or wait that is moved."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pytest_fxbucket.golden.mismatch import changes
from pytest_fxbucket.golden.read_back import read_back
from pytest_fxbucket.golden.schedule import NamedBucket, Schedule
from suites.golden.by_hand import KINDS, body, bucket, events

NAMES = ("layers.{}", "layers.{}.mlp.0", "h.{}", "block{}", "{}", "layers.0+layers.{}", "layers.{} & norm")


def drawn(draw: random.Random) -> Schedule:
    """Some layers of one name, with a number of buckets each, launched ahead and waited for behind."""
    name, count = draw.choice(NAMES), draw.randint(1, 9)
    kinds = draw.sample(sorted(KINDS), draw.randint(1, 2))
    numbers = draw.randint(1, 3)
    updates = draw.random() < 0.3
    buckets: list[NamedBucket] = []
    forward: list[str] = []
    for i in range(count):
        entry = name.format(i)
        odd = draw.random() < 0.1
        for kind in kinds:
            for number in range(1, numbers + 1):
                members = [f"p{number}.{j}" for j in range(draw.randint(1, 3) if odd else 2)]
                buckets.append(bucket(entry, *members, kind=kind, number=number))
                label = f"{kind} {entry}" + (f" #{number}" if number > 1 else "")
                forward += [f"L {label}", *([f"C {entry} (1 of 2)"] if odd else []), f"W {label}"]
        forward += [f"C {entry}", *([f"U {entry}"] if updates else [])]
    return Schedule(events(", ".join(forward)), tuple(buckets))


@pytest.mark.parametrize("seed", range(60))
def test_a_random_schedule_is_read_back_and_nothing_is_said_of_none(seed: int) -> None:
    schedule = drawn(random.Random(seed))
    (graph,) = read_back(body(schedule)).graphs.values()
    assert graph.events["forward"] == [f"{event.what} {event.label}" for event in schedule.events]
    read = {(one.name, one.dtype, one.bytes, one.dims, one.op, one.members) for one in graph.buckets}
    whole = {(f"{b.direction} {b.label}", b.dtype, b.bytes, b.dims, b.op, b.members) for b in schedule.buckets}
    assert read == whole
    assert len(graph.buckets) == len(schedule.buckets)
    assert changes(body(schedule), body(schedule)) == []


@pytest.mark.parametrize("seed", range(60))
def test_of_a_launch_or_wait_that_moved_one_sentence_tells(seed: int) -> None:
    draw = random.Random(1000 + seed)
    schedule = drawn(draw)
    movable = [at for at, event in enumerate(schedule.events) if event.what != "compute"]
    told = 0
    for _ in range(6):
        rest = list(schedule.events)
        event = rest.pop(draw.choice(movable))
        rest.insert(draw.randrange(len(rest) + 1), event)
        after = replace(schedule, events=tuple(rest))
        if body(after) == body(schedule):
            continue
        said = changes(body(schedule), body(after))
        assert len(said) == 1
        assert event.label in said[0] or "swapped" in said[0]
        told += 1
    assert told
