"""The text of a schedule: short where layers are alike, whole when written out, the same whatever nodes are named."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.roles import StepGraph
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.graph.schedule import Event, NamedBucket, Schedule, schedule_of
from pytest_fxbucket.graph.text import fold, schedule_lines, unfold
from pytest_fxbucket.plan.schema import Model, Parallel, Plan

MEMBERS = ("attention.wq.weight", "attention.wo.weight", "mlp.0.weight", "mlp.2.weight", "norm.weight")


def layered(layers: int, members: Sequence[str] = MEMBERS, odd: int | None = None, prefetch: int = 1) -> Schedule:
    """A schedule as our pass makes it: each launch before the layer before it; layer ``odd`` lost its last member."""
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm+output"]
    events = [Event("forward", "launch", f"all_gather {name}") for name in names[:prefetch]]
    for at, name in enumerate(names):
        events += [Event("forward", "launch", f"all_gather {later}") for later in names[at + prefetch : at + prefetch + 1]]
        events += [Event("forward", "wait", f"all_gather {name}"), Event("forward", "compute", name)]
    for name in reversed(names):
        events += [Event("backward", what, f"reduce_scatter {name}") for what in ("launch", "wait")]
    buckets = []
    for direction, kind, order in (("forward", "all_gather", 1), ("backward", "reduce_scatter", -1)):
        for name in names[::order]:
            held = [member for i, member in enumerate(members) if not (name == f"layers.{odd}" and i == len(members) - 1)]
            sizes = tuple((f"{name}.{member}" if "." in name else name, 128) for member in held)
            op = "avg" if kind == "reduce_scatter" else ""
            buckets.append(NamedBucket(direction, f"{kind} {name}", "bfloat16", 256 * len(held), "dp_shard", op, sizes))
    return Schedule(tuple(events), tuple(buckets))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_model_of_126_layers_is_a_text_that_a_person_can_review(prefetch: int) -> None:
    schedule = layered(126, prefetch=prefetch)
    lines, written = schedule_lines(schedule), schedule_lines(schedule, folded=False)
    assert len(written) > 2000
    assert len(lines) <= 120
    assert unfold(lines) == written


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
        "  repeat 4 times, i = 0, 2 ... 6", "    launch all_gather layers.{i}+layers.{i+1}", "  end",
    ]  # fmt: skip
    assert unfold(fold(down)) == down
    assert unfold(fold(pairs)) == pairs
    assert unfold(fold(pairs[::-1])) == pairs[::-1]


def test_a_layer_that_differs_stands_outside_the_repetition() -> None:
    lines = schedule_lines(layered(126, odd=40))
    assert "  forward all_gather layers.40: 4 members, bfloat16, 1024 bytes, dp_shard" in lines
    assert not any("layers.40.norm" in line for line in lines)
    assert not any("layers.41:" in line for line in lines[: lines.index("buckets")])
    assert unfold(lines) == schedule_lines(layered(126, odd=40), folded=False)
    assert len(lines) < 200


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


@pytest.fixture(scope="module")
def llama() -> StepGraph:
    args = {"layers": 4, "dim": 32, "heads": 2, "kv_heads": 1}
    model = Model("fixtures.models.llama:build", "fixtures.models.llama:batch", args, "fixtures.models.llama:loss")
    return capture_plan(Plan(Path("plan.toml"), model=model, parallel=Parallel(dp_shard=2)), 2, 0)


def text_of(step: StepGraph, *, folded: bool = True) -> list[str]:
    reading = read_graph(step.graphs["joint"].graph, step.inputs["joint"], step.outputs["joint"])
    entry_of = {p.fqn: ".".join(p.fqn.split(".")[:2]) for p in step.parameters}
    return schedule_lines(schedule_of(reading, entry_of, {"0": "dp_shard"}), folded=folded)


def test_the_text_of_a_captured_step_folds_and_comes_back(llama: StepGraph) -> None:
    lines, written = text_of(llama), text_of(llama, folded=False)
    assert unfold(lines) == written
    assert len(lines) < len(written) / 2
    assert "dp_shard" in " ".join(lines)


def test_names_of_nodes_and_of_groups_are_not_in_the_text(llama: StepGraph) -> None:
    before = text_of(llama)
    for at, node in enumerate(llama.graphs["joint"].graph.nodes):
        node.name = f"renamed{at}"
    assert text_of(llama) == before
    assert not any("renamed" in line for line in text_of(llama))
