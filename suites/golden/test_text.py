"""The text of a schedule: short where layers are alike, and all that the schedule had is read back from it.

Lines that repeat but for an index are a block, and come back as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from difflib import ndiff

import pytest

from pytest_fxbucket.golden.read_back import read_back
from pytest_fxbucket.golden.schedule import Event, Schedule
from pytest_fxbucket.golden.text import fold, fold_alike, numbers_of, ranges_text, schedule_lines, unfold, unfold_alike
from suites.golden.by_hand import body, bucket, events

LAYERS = 126
DENSE = ("attention.wq.weight", "attention.wo.weight", "mlp.0.weight", "mlp.2.weight", "norm.weight")
EXPERTS = (*DENSE[:2], *(f"experts.{e}.{w}.weight" for e in range(64) for w in ("w1", "w2", "w3")), "router.weight")
Members = Callable[[int], tuple[str, ...]]


def decoder(members_of: Members, prefetch: int = 1, kinds: tuple[str, ...] = ()) -> Schedule:
    """A schedule as our pass makes it, of 126 layers; ``kinds`` of activations are communicated in each layer too."""
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(LAYERS)), "norm+output"]
    held = {name: members_of(i - 1) if name.startswith("layers") else ("weight",) for i, name in enumerate(names)}
    forward, backward = [f"L ag {name}" for name in names[:prefetch]], list[str]()
    for at, name in enumerate(names):
        forward += [f"L ag {later}" for later in names[at + prefetch : at + prefetch + 1]]
        forward += [f"W ag {name}"]
        forward += [f"{what} {kind} activations of {name}" for kind in kinds for what in "LW"]
        forward += [f"C {name}"]
    for name, behind in zip(reversed(names), ["", *reversed(names)], strict=False):
        backward += [f"C {name}", f"L rs {name}", *([f"W rs {behind}"] if behind else [])]
    rows = [("ag", "forward"), ("ag", "backward"), ("rs", "backward")]
    buckets = [bucket(name, *held[name], kind=kind, direction=way) for name in names for kind, way in rows]
    buckets += [bucket(f"activations of {name}", "/no.parameter", kind=kind) for name in names for kind in kinds]
    return Schedule((*events(", ".join(forward)), *events(", ".join(backward), "backward")), tuple(buckets))


KINDS: dict[str, tuple[Schedule, int]] = {
    "no prefetch": (decoder(lambda _: DENSE, prefetch=0), 70),
    "prefetch": (decoder(lambda _: DENSE), 70),
    "far prefetch": (decoder(lambda _: DENSE, prefetch=3), 70),
    "one layer differs": (decoder(lambda i: DENSE if i != 60 else DENSE[:-1]), 70),
    "dense layers, then experts": (decoder(lambda i: DENSE if i < 3 else EXPERTS), 90),
    "experts in every other layer": (decoder(lambda i: EXPERTS if i % 2 else DENSE), 90),
    "tensor parallel": (decoder(lambda _: DENSE, kinds=("ag", "ar")), 90),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_126_layers_is_a_text_that_a_person_can_review(kind: str) -> None:
    schedule, most = KINDS[kind]
    assert len(schedule_lines(schedule, folded=False)) > 1900
    assert len(schedule_lines(schedule)) <= most < 300


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_schedule_had_is_read_back(kind: str) -> None:
    schedule, _ = KINDS[kind]
    (graph,) = read_back(body(schedule)).graphs.values()
    assert sorted(graph.buckets, key=str) == sorted(schedule.buckets, key=str)
    for direction, read in graph.events.items():
        assert read == [f"{event.what} {event.label}" for event in schedule.events if event.section == direction]


def test_the_layer_that_differs_stands_out() -> None:
    lines = schedule_lines(KINDS["one layer differs"][0])
    assert "  layers.{i}, i = 0 ... 59, 61 ... 125" in lines
    at = lines.index("  layers.60")
    assert [line.strip() for line in lines[at + 4 : at + 9]] == [
        *(f"layers.60.{member} 4" for member in DENSE[:-1]),
        "norm+output",
    ]


def test_an_event_more_in_one_layer_leaves_the_lines_of_the_others_as_they_were() -> None:
    even = decoder(lambda _: DENSE)
    odd: list[Event] = []
    for event in even.events:
        more = event.section == "forward" and event.label == "layers.60"
        odd += [event, *(events("L ag layers.60 #2, W ag layers.60 #2, C layers.60") if more else ())]
    before, after = (schedule_lines(replace(even, events=tuple(one))) for one in (even.events, odd))
    changed = [line for line in ndiff(before, after) if line[0] in "+-"]
    assert sum("layers.60" in line for line in changed) == 3
    assert sum("repeat" in line for line in changed) == 3
    assert len(changed) <= 3 + 3 + 4


def test_an_optimizer_has_a_section_of_its_own() -> None:
    step = Schedule((*events("C a"), *events("C a", "backward"), *events("L ar a, W ar a, C a", "optimizer")), ())
    lines = schedule_lines(step)
    assert lines[lines.index("optimizer") :][:4] == [
        "optimizer", "  launch  all_reduce a", "  wait    all_reduce a", "  compute a",
    ]  # fmt: skip


def test_buckets_of_an_entry_that_carry_the_same_list_it_once_and_others_each() -> None:
    same = bucket("a", "w", "b"), bucket("a", "w", "b", kind="rs", direction="backward")
    assert schedule_lines(Schedule((), same))[1:] == [
        "  a",
        "    forward all_gather: 2 members, float32, 128 bytes, dp_shard",
        "    backward reduce_scatter: 2 members, float32, 128 bytes, avg over dp_shard",
        "      a.w 4",
        "      a.b 4",
    ]
    other = same[0], replace(same[1], members=same[1].members[::-1])
    assert sum("a.w 4" in line for line in schedule_lines(Schedule((), other))) == 2


def test_a_launch_that_carries_nothing_known_is_read_back_too() -> None:
    one = replace(bucket("activations", kind="ar"), bytes=64)
    (graph,) = read_back(body(Schedule((), (one, bucket("b", "w"))))).graphs.values()
    assert [len(read.members) for read in graph.buckets] == [0, 1]


def test_a_layer_counts_and_what_stays_the_same_in_it_stays_a_number() -> None:
    lines = fold([f"    layers.{i}.mlp.{j}.weight 8" for i in range(5) for j in (0, 2)])
    assert lines == [
        "    repeat 5 times, i = 0 ... 4",
        "      layers.{i}.mlp.0.weight 8",
        "      layers.{i}.mlp.2.weight 8",
        "    end",
    ]


def test_layers_that_count_down_and_layers_in_pairs_fold() -> None:
    down = [f"  wait reduce_scatter layers.{i}" for i in range(9, -1, -1)]
    assert fold(down) == [
        "  repeat 10 times, i = 9 ... 0", "    wait reduce_scatter layers.{i}", "  end",
    ]  # fmt: skip
    pairs = [f"  launch all_gather layers.{i}+layers.{i + 1}" for i in range(0, 8, 2)]
    assert fold(pairs) == [
        "  repeat 4 times, i = 0 ... 6 by 2", "    launch all_gather layers.{i}+layers.{i+1}", "  end",
    ]  # fmt: skip
    assert unfold(fold(down)) == down
    assert unfold(fold(pairs)) == pairs
    assert unfold(fold(pairs[::-1])) == pairs[::-1]


def test_what_stands_there_twice_is_written_twice() -> None:
    lines = ["  compute layers.0", "  compute layers.1", *(f"  compute head{end}" for end in "abcdef")]
    assert fold(lines) == lines


def test_indices_that_count_by_different_steps_are_no_layers() -> None:
    lines = [f"  compute layers.{i}.part.{2 * i}" for i in range(5)]
    assert fold(lines) == lines


@pytest.mark.parametrize("names", [["00", "01", "02", "03"], ["1", "2", "03", "4"], ["\u0663", "\u0664", "\u0665", "\u0666"]])
def test_keys_that_are_no_plain_numbers_come_back_as_they_are(names: list[str]) -> None:
    """A ModuleDict may have any keys."""
    lines = [f"  compute layers.{name}" for name in names]
    assert unfold(fold(lines)) == lines


@pytest.mark.parametrize("seed", range(8))
def test_any_lines_come_back_as_they_were(seed: int) -> None:
    draw = random.Random(seed)
    folded = 0
    for _ in range(60):
        lines: list[str] = []
        for _ in range(draw.randint(1, 4)):
            block = [
                (
                    draw.choice(["  ", "    "]),
                    draw.choice(["a", "b", "a.3"]),
                    draw.choice([0, 0, 1, 2]),
                    draw.choice(["", ".0"]),
                )
                for _ in range(draw.randint(1, 4))
            ]
            step, start = draw.choice([1, 1, -1, 2, 0]), draw.randint(10, 12)
            for time in range(draw.randint(1, 6)):
                lines += [f"{indent}{name}.{start + time * step + more}{end}" for indent, name, more, end in block]
                if draw.random() < 0.05:
                    lines.append("  something else")
        short = fold(lines)
        assert unfold(short) == lines
        folded += len(short) < len(lines)
    assert folded > 20


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0, 1, 2, 3], "0 ... 3"),
        ([3, 2, 1, 0], "3 ... 0"),
        ([0, 2, 4, 6], "0 ... 6 by 2"),
        ([0, 1], "0, 1"),
        ([*range(60), *range(61, 126)], "0 ... 59, 61 ... 125"),
        ([7], "7"),
        ([9, 6, 3, 1], "9 ... 3 by 3, 1"),
    ],
)
def test_numbers_are_ranges_and_come_back(numbers: list[int], text: str) -> None:
    assert ranges_text(numbers) == text
    assert numbers_of(text) == numbers


def test_blocks_that_are_alike_are_one_wherever_they_stand() -> None:
    blocks = [(f"layers.{i}", f"  layers.{i}.w {8 if i == 2 else 4}", "  layers.1.shared 2") for i in range(5)]
    short = fold_alike(blocks)
    assert short == [
        ("layers.{i}, i = 0, 3, 4", "  layers.{i}.w 4", "  layers.1.shared 2"),
        blocks[1],
        blocks[2],
    ]
    assert sorted(one for block in short for one in unfold_alike(block)) == sorted(blocks)
