"""Tables of runs against arrays that hold every byte: a copy between any two views must come out the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from pytest_fxbucket.graph import contents
from pytest_fxbucket.graph.contents import EXACT, OWN_RANK, UNDEFINED, ZERO, ByteRange, Runs

BYTE, HALF, WHOLE = (contents.form_of(dtype) for dtype in (torch.uint8, torch.bfloat16, torch.float32))


def elements(runs: Runs) -> list[tuple[int, int, int, int, int]]:
    """(source, rank, index, precision, form) of each byte; what is undefined or zero has no index."""
    found = []
    for offset, length, source, rank, start, precision, form in runs:
        assert offset == len(found), "runs cover everything in order, without a gap"
        assert length > 0, "no run is empty"
        found += [(source, rank, start + i if source > ZERO else start, precision, form) for i in range(length)]
    return found


def table(*rows: Sequence[int]) -> Runs:
    return tuple(ByteRange(*row) for row in rows)


def placed(draw: random.Random, numel: int) -> torch.Tensor | None:
    """A view into ``numel`` bytes, of elements of one to four, in up to three dimensions of any memory order, with gaps.

    None if it does not fit.
    """
    dtype = draw.choice([torch.uint8, torch.bfloat16, torch.float32])
    numel //= dtype.itemsize
    shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
    strides, step = [0] * len(shape), 1
    for dim in draw.sample(range(len(shape)), len(shape)):
        step += draw.choice([0, 0, 1])
        strides[dim] = step
        step *= shape[dim]
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    if extent > numel:
        return None
    return torch.as_strided(torch.empty(numel, dtype=dtype, device="meta"), shape, strides, draw.randint(0, numel - extent))


def places(view: torch.Tensor) -> list[int]:
    """Where in the storage the bytes of ``view`` lie, in logical order of its elements."""
    spans = itertools.product(*(range(size) for size in view.shape))
    starts = [view.storage_offset() + sum(i * s for i, s in zip(at, view.stride(), strict=True)) for at in spans]
    return [start * view.itemsize + byte for start in starts for byte in range(view.itemsize)]


def drawn_runs(draw: random.Random, numel: int, first_source: int) -> Runs:
    """``numel`` bytes in one to four runs: of sources, of zeros, of other ranks, of fewer bits, in several forms."""
    ends = sorted({*(draw.randint(1, numel) for _ in range(draw.randint(0, 3))), numel})
    rows = []
    for i, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        source = draw.choice([UNDEFINED, ZERO, first_source + i, first_source + i])
        known = source > ZERO
        rank, start = (draw.choice([OWN_RANK, 0, 1]), draw.randint(0, 5)) if known else (OWN_RANK, 0)
        form = draw.choice([BYTE, HALF]) if known else 0
        rows.append((begin, end - begin, source, rank, start, draw.choice([EXACT, 7]), form))
    return table(*rows)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_copied_through_any_views_arrives_element_by_element(seed: int) -> None:
    draw, copies = random.Random(seed), 0
    for _ in range(20):
        numel = draw.randint(4, 80)
        content = drawn_runs(draw, numel, 2)
        real = elements(content)
        for step in range(5):
            if (view := placed(draw, numel)) is None:
                continue
            where = places(view)
            assert elements(contents.read(content, view)) == [real[at] for at in where]
            written = drawn_runs(draw, view.nbytes, 10 * (step + 1))
            content = contents.write(content, view, written)
            for at, element in zip(where, elements(written), strict=True):
                real[at] = element
            assert elements(content) == real
            copies += 1
    assert copies > 50


def test_blocks_of_a_view_cover_its_elements_in_order() -> None:
    draw, seen = random.Random(1), 0
    for _ in range(300):
        if (view := placed(draw, 40)) is not None:
            starts, length = contents.blocks(view)
            assert [int(s) + i for s in starts for i in range(length)] == places(view)
            seen += 1
    assert seen > 100


def test_a_transposed_matrix_reads_like_itself() -> None:
    matrix = torch.empty(3, 4, device="meta")
    content = contents.run(2, 48, dtype=torch.float32)
    assert len(contents.read(content, matrix.t())) == 12
    assert contents.read(content, contents.in_memory_order(matrix.t())) == content


def test_a_row_of_many_ranks_stays_one_run_for_each() -> None:
    rows = table(*((32 * rank, 32, 2, rank, 0, EXACT, WHOLE) for rank in range(4096)))
    column = torch.empty(4096, 8, device="meta").narrow(1, 2, 3)
    piece = contents.read(rows, column)
    assert len(piece) == 4096
    assert [one.rank for one in piece] == list(range(4096))
    assert {one.length for one in piece} == {12}


def test_a_storage_filled_in_one_go_holds_what_it_would_after_one_write_for_each_part() -> None:
    draw = random.Random(2)
    for _ in range(50):
        rows, sizes = draw.randint(1, 5), [draw.randint(1, 6) for _ in range(draw.randint(1, 6))]
        whole = torch.empty(rows, sum(sizes), dtype=torch.uint8, device="meta")
        views = torch.split(whole, sizes, 1)
        parts = [(view, drawn_runs(draw, view.nbytes, 10 * i + 2)) for i, view in enumerate(views)]
        content = contents.run(UNDEFINED, whole.nbytes)
        for view, runs in parts:
            content = contents.write(content, view, runs)
        draw.shuffle(parts)
        assert contents.filled(parts) == content


def test_the_first_bytes_are_those_that_a_view_of_them_reads() -> None:
    draw = random.Random(4)
    for _ in range(50):
        content = contents.joined(drawn_runs(draw, 40, 2))
        length = draw.randint(0, 40)
        assert contents.first(content, length) == contents.read(content, torch.empty(length, dtype=torch.uint8, device="meta"))


def test_nothing_is_nothing() -> None:
    content = contents.run(2, 24)
    none = torch.empty(0, 3, device="meta")
    assert len(contents.run(2, 0)) == 0
    assert contents.size(contents.run(2, 0)) == 0
    assert len(contents.read(content, none)) == 0
    assert contents.write(content, none, ()) == content
    assert len(contents.joined(content[:0])) == 0
    assert len(contents.cut(content[:0], 4)) == 0


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 100])
def test_cut_runs_hold_the_same_and_cross_no_multiple(length: int) -> None:
    draw = random.Random(length)
    for _ in range(30):
        runs = drawn_runs(draw, draw.randint(1, 40), 2)
        pieces = contents.cut(runs, length)
        assert elements(pieces) == elements(runs)
        assert all(one.offset // length == (one.end - 1) // length for one in pieces)


def test_joined_is_the_same_in_as_few_runs_as_possible() -> None:
    draw = random.Random(3)
    for _ in range(100):
        runs = drawn_runs(draw, draw.randint(1, 40), 2)
        joined = contents.joined(contents.cut(runs, draw.randint(1, 5)))
        assert elements(joined) == elements(runs)
        assert len(joined) <= len(runs)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param((4, 4, 2, 1, 4, EXACT, BYTE), id="rank"),
        pytest.param((4, 4, 3, 0, 4, EXACT, BYTE), id="source"),
        pytest.param((4, 4, 2, 0, 5, EXACT, BYTE), id="start"),
        pytest.param((4, 4, 2, 0, 4, 7, BYTE), id="precision"),
        pytest.param((5, 4, 2, 0, 4, EXACT, BYTE), id="offset"),
        pytest.param((4, 4, 2, 0, 4, EXACT, HALF), id="form"),
    ],
)
def test_runs_that_differ_in_anything_are_not_joined(second: tuple[int, ...]) -> None:
    first = (0, 4, 2, 0, 0, EXACT, BYTE)
    assert len(contents.joined(table(first, (4, 4, 2, 0, 4, EXACT, BYTE)))) == 1
    assert len(contents.joined(table(first, second))) == 2


def test_zeros_join_although_they_count_nothing() -> None:
    assert contents.joined(table((0, 4, ZERO, OWN_RANK, 0, EXACT, 0), (4, 2, ZERO, OWN_RANK, 0, EXACT, 0))) == table(
        (0, 6, ZERO, OWN_RANK, 0, EXACT, 0)
    )


def test_a_cast_keeps_elements_and_notes_the_bits_it_leaves() -> None:
    runs = table((0, 8, 2, 1, 4, EXACT, WHOLE), (8, 4, ZERO, OWN_RANK, 0, EXACT, 0))
    narrow = contents.cast(runs, torch.float32, torch.bfloat16, 7)
    assert narrow is not None
    assert narrow == table((0, 4, 2, 1, 2, 7, HALF), (4, 2, ZERO, OWN_RANK, 0, 7, 0))
    wide = contents.cast(narrow, torch.bfloat16, torch.float32, 23)
    assert wide is not None
    assert wide == tuple(one._replace(precision=7) for one in runs)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param((0, 8, 2, 0, 0, EXACT, HALF), id="seen as another dtype"),
        pytest.param((0, 8, 2, 0, 2, EXACT, WHOLE), id="from the middle of an element"),
        pytest.param((0, 6, 2, 0, 0, EXACT, WHOLE), id="to the middle of an element"),
    ],
)
def test_what_is_no_row_of_elements_cannot_be_cast(row: tuple[int, ...]) -> None:
    assert contents.cast(table(row), torch.float32, torch.bfloat16, 7) is None


@pytest.mark.parametrize(("start", "length", "whole"), [(4, 8, True), (2, 8, False), (4, 6, False)])
def test_a_run_between_elements_is_told_from_one_through_them(start: int, length: int, whole: bool) -> None:
    assert contents.whole_elements(table((0, length, 2, 0, start, EXACT, WHOLE))) == whole


def test_two_groups_may_be_nested_either_way_and_no_other() -> None:
    """Rank 3 * outer + inner of 2 times 3."""

    def gathered(ranks: Sequence[int]) -> bool:
        rows = table(*((8 * i, 8, 2, rank, 0, EXACT, WHOLE) for i, rank in enumerate(ranks)))
        return contents.ascends(rows, 2, (2, 3))

    assert gathered([0, 1, 2, 3, 4, 5])
    assert gathered([0, 3, 1, 4, 2, 5])
    assert not gathered([0, 1, 3, 2, 4, 5])
