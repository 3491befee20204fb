"""Equal layers as one row: nothing is folded that differs, and no count is taken for a layer's number."""

from __future__ import annotations

import pytest

from pytest_fxbucket.explain.report import GraphReport
from pytest_fxbucket.explain.text import WIDTH, TextRow, fold, fold_names, graph_lines
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.targets import LeftAlone


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["layers.0.w", "layers.1.w", "layers.2.w"], ["layers.[0-2].w"]),
        (["layers.2.w", "layers.1.w"], ["layers.[1-2].w"]),
        (["layers.0.w", "layers.2.w"], ["layers.0.w", "layers.2.w"]),
        (["layers.0.w", "layers.1.b", "layers.1.w"], ["layers.[0-1].w", "layers.1.b"]),
        (["blocks.0.layers.0", "blocks.0.layers.1", "blocks.1.layers.1"], ["blocks.0.layers.[0-1]", "blocks.1.layers.1"]),
        (["0.weight", "1.weight"], ["[0-1].weight"]),
        (["w1", "w2"], ["w1", "w2"]),
        (["layers.9", "layers.10", "layers.11"], ["layers.[9-11]"]),
    ],
)
def test_neighbouring_numbers_of_equal_names_are_a_range(names: list[str], folded: list[str]) -> None:
    assert fold_names(names) == folded


def test_a_neighbour_in_a_cell_is_folded_along_and_another_one_keeps_rows_apart() -> None:
    rows = [TextRow(f"layers.{i}", (f"9 nodes of layers.{i - 1}",)) for i in range(1, 4)]
    (row,) = fold(rows)
    assert (row.entry, row.cells, row.count) == ("layers.[1-3]", ("9 nodes of layers.[0-2]",), 3)
    assert len(fold([*rows, TextRow("layers.4", ("9 nodes of layers.0",))])) == 2


def test_a_count_that_grows_with_the_layer_is_no_number_of_a_layer() -> None:
    rows = [TextRow(f"{i}", (f"{i} nodes",)) for i in range(3)]
    assert fold(rows) == rows
    assert [row.entry for row in fold([TextRow(f"{i}", ("9 nodes",)) for i in range(3)])] == ["[0-2]"]


def test_a_range_in_a_cell_is_folded_too() -> None:
    rows = [TextRow(f"layers.{i}", (f"of layers.[{i - 1}-{i}]",)) for i in (2, 3)]
    assert [row.cells for row in fold(rows)] == [("of layers.[1-3]",)]


def test_a_hundred_layers_and_long_names_fit_a_screen() -> None:
    """Whatever the names are: at most 120 columns, and equal layers in as many lines as one."""
    name = "a_module_with_quite_a_long_name"
    buckets = [
        BucketReport(
            entry=f"{name}.{i}",
            direction="forward",
            kind="all_gather",
            group="0",
            op="",
            dtype="float32",
            members=tuple(f"{name}.{i}.{part}.{'x' * 50}" for part in "abc"),
            bytes=1 << 30,
            launch=f"launch_{i}",
            launches_before=3,
            overlap_nodes=7,
            overlaps=(f"{name}.{i - 1}", "+".join(f"other.{n}" for n in range(4))),
        )
        for i in range(1, 101)
    ]
    left = tuple(LeftAlone(f"all_gather of {name}.{i}.w (forward)", "no entry names its parameter") for i in range(100))
    barriers = ("custom.op (op_1) does not say what it writes: nothing is moved past it",)
    report = PassReport(400, 200, tuple(buckets), left, barriers=barriers)
    labels = {bucket.launch: bucket.entry for bucket in buckets}
    lines = list(graph_lines(GraphReport("joint", report, {"0": "dp_shard"}, {}, labels)))
    assert len(lines) < 25
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert f"all_gather of {name}.[0-99].w (forward): no entry names its parameter" in " ".join(text.split())
    assert "1 barrier\n  custom.op (op_1) does not say what it writes: nothing is moved past it" in text
