"""A changed schedule is told in words, then as a diff, then with the command that accepts it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.capture.roles import MeshDim
from pytest_fxbucket.checks.golden import golden_text, mismatch_lines
from pytest_fxbucket.graph.schedule import Event, NamedBucket, Schedule
from pytest_fxbucket.graph.text import schedule_lines
from pytest_fxbucket.graph.words import differences

ROOT = Path(__file__).parents[2]


def bucket(entry: str, *members: str, kind: str = "all_gather", direction: str = "forward") -> NamedBucket:
    op = "avg" if kind == "reduce_scatter" else ""
    return NamedBucket(
        direction="backward" if direction == "backward" else "forward",
        label=f"{kind} {entry}",
        dtype="float32",
        bytes=64 * len(members),
        dims="dp_shard",
        op=op,
        members=tuple((f"{entry}.{member}", 4) for member in members),
    )


def forward(*names: str) -> tuple[Event, ...]:
    """``launch:a`` and so on, of all-gathers."""
    events = []
    for name in names:
        what, entry = name.split(":")
        events.append(Event("forward", what, entry if what == "compute" else f"all_gather {entry}"))
    return tuple(events)


A, B, C = bucket("a", "w", "b"), bucket("b", "w", "b"), bucket("c", "w")
EVENTS = forward("launch:a", "launch:b", "wait:a", "compute:a", "launch:c", "wait:b", "compute:b", "wait:c", "compute:c")
GOOD = Schedule(EVENTS, (A, B, C))


def words(changed: Schedule) -> list[str]:
    return differences(schedule_lines(GOOD), schedule_lines(changed))


def moved(event: str, to: int) -> Schedule:
    (one,) = forward(event)
    rest = [other for other in EVENTS if other != one]
    return replace(GOOD, events=(*rest[:to], one, *rest[to:]))


class TestWords:
    def test_nothing_changed_nothing_said(self) -> None:
        assert words(GOOD) == []

    def test_a_bucket_lost_and_a_new_one(self) -> None:
        other = replace(GOOD, buckets=(A, B, bucket("d", "w", "b")))
        assert words(other) == ["bucket lost: forward all_gather c (1 member)", "bucket new: forward all_gather d (2 members)"]

    def test_a_member_gained_and_lost(self) -> None:
        other = replace(GOOD, buckets=(bucket("a", "w"), bucket("b", "w", "b", "scale"), C))
        assert words(other) == [
            "bytes of forward all_gather a changed: 128 -> 64",
            "forward all_gather a lost a.b",
            "bytes of forward all_gather b changed: 128 -> 192",
            "forward all_gather b gained b.scale",
        ]

    def test_members_in_another_order(self) -> None:
        assert words(replace(GOOD, buckets=(bucket("a", "b", "w"), B, C))) == [
            "byte layout of forward all_gather a changed: a.b stands where a.w stood"
        ]

    def test_a_member_of_another_size_is_no_loss(self) -> None:
        resized = replace(A, members=(("a.w", 8), ("a.b", 4)))
        assert words(replace(GOOD, buckets=(resized, B, C))) == ["a.w of forward all_gather a changed: 4 -> 8 elements"]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"dtype": "bfloat16"}, "dtype of forward all_gather a changed: float32 -> bfloat16"),
            ({"bytes": 256}, "bytes of forward all_gather a changed: 128 -> 256"),
            ({"dims": "ranks [0, 1]"}, "group or op of forward all_gather a changed: dp_shard -> ranks [0, 1]"),
            ({"op": "sum"}, "group or op of forward all_gather a changed: dp_shard -> dp_shard sum"),
        ],
    )
    def test_dtype_bytes_group_and_op(self, change: dict[str, object], said: str) -> None:
        assert words(replace(GOOD, buckets=(replace(A, **change), B, C))) == [said]

    @pytest.mark.parametrize(
        ("event", "to", "said"),
        [
            ("launch:c", 1, "forward: launch all_gather c moved earlier past launch all_gather b"),
            ("launch:b", 4, "forward: launch all_gather b moved later past launch all_gather c"),
            ("wait:c", 5, "forward: wait all_gather c moved earlier past wait all_gather b"),
            ("wait:a", 0, "forward: wait all_gather a moved earlier past launch all_gather a"),
        ],
    )
    def test_a_launch_or_wait_that_moved_and_past_what(self, event: str, to: int, said: str) -> None:
        assert words(moved(event, to)) == [said]

    @pytest.mark.parametrize("event", ["launch:b", "wait:b"])
    def test_an_event_that_is_gone_or_new_while_its_bucket_stays(self, event: str) -> None:
        (one,) = forward(event)
        without = replace(GOOD, events=tuple(other for other in EVENTS if other != one))
        said = event.replace(":", " all_gather ")
        assert words(without) == [f"forward: {said} is gone"]
        assert differences(schedule_lines(without), schedule_lines(GOOD)) == [f"forward: {said} is new"]

    def test_layers_that_fold_are_compared_one_by_one(self) -> None:
        layers = [bucket(f"layers.{i}", "w", "b") for i in range(6)]
        folded = Schedule((), tuple(layers))
        assert any("repeat" in line for line in schedule_lines(folded))
        layers[3] = bucket("layers.3", "b", "w")
        assert differences(schedule_lines(folded), schedule_lines(Schedule((), tuple(layers)))) == [
            "byte layout of forward all_gather layers.3 changed: layers.3.b stands where layers.3.w stood"
        ]


class TestMismatch:
    def text(self, schedule: Schedule) -> str:
        return golden_text("plans/x.toml", [MeshDim("dp_shard", 4)], {"joint": schedule})

    def test_words_then_diff_then_the_command(self) -> None:
        lines = mismatch_lines(self.text(GOOD), self.text(moved("launch:c", 1)), "pytest x --accept")
        assert lines[:2] == ["what changed:", "  forward: launch all_gather c moved earlier past launch all_gather b"]
        assert lines[3:5] == ["--- golden", "+++ found"]
        assert "+  launch  all_gather c" in lines
        assert lines[-1] == "to accept: pytest x --accept"

    def test_a_long_diff_is_cut_and_counted(self) -> None:
        many = Schedule((), tuple(bucket(f"m{i}x", "w") for i in range(80)))
        lines = mismatch_lines(self.text(GOOD), self.text(many), "accept")
        assert len(lines) < 160
        assert any(line.startswith("... and ") and line.endswith(" more lines of diff") for line in lines)

    def test_a_change_of_the_mesh_alone_is_not_called_nothing(self) -> None:
        lines = mismatch_lines(self.text(GOOD), self.text(GOOD).replace("dp_shard=4", "dp_shard=8"), "accept")
        assert lines[1] == "  the text changed, but no bucket, launch or wait did"
        assert "-mesh dp_shard=4" in lines


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.run import PlanRun, RunSettings
from small_llama import PLAN
folder = Path({folder!r})
plan = load_plans(folder / "small.toml")[0]
run = PlanRun(plan, RunSettings(folder, folder / "golden", folder / "artifacts"), None)
world = run._mesh_world
for rank in (0, 3):
    print(run._golden_text(world, world.passed(rank)), "=====")
"""


def test_the_text_is_the_same_on_every_rank_and_for_every_hash_seed(tmp_path: Path) -> None:
    from small_llama import make_project

    make_project(tmp_path)
    script = SCRIPT.format(path=[str(Path(__file__).parent), str(ROOT)], folder=str(tmp_path))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "77")
    ]
    texts = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    first, second, rest = texts[0].split("=====\n")
    assert first == second != ""
    assert rest == ""
    assert texts[0] == texts[1]
