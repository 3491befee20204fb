"""Lines that repeat but for an index are a block, and come back as they were."""

from __future__ import annotations

import random

import pytest

from pytest_fxbucket.golden.text import fold, fold_alike, numbers_of, ranges_text, unfold, unfold_alike


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
