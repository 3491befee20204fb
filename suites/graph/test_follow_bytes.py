"""Members of several dtypes in one launch are followed as bytes: a byte in the wrong place shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.errors import PassError
from suites.graph.handmade import RANKS, Handmade, aten

BYTE, HALF, WHOLE = torch.uint8, torch.bfloat16, torch.float32
SHARDS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "a": ((2, 3), WHOLE),
    "b": ((3,), HALF),
    "c": ((1, 5), HALF),
    "d": ((2,), WHOLE),
}
SIZES = [24, 0, 6, 2, 10, 2, 8, 0]
"""Bytes of each member and of the gap behind it, so that each begins at a multiple of four."""


def as_bytes(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten.view.dtype, made.call(aten.view.default, node, [-1]), BYTE)


def packed(made: Handmade) -> fx.Node:
    parts: list[fx.Node] = []
    for (fqn, (shape, dtype)), gap in zip(SHARDS.items(), SIZES[1::2], strict=True):
        member = as_bytes(made, made.param(fqn, *shape, dtype=dtype))
        parts.append(made.call(aten.constant_pad_nd.default, member, [0, gap]) if gap else member)
    return made.call(aten.cat.default, parts)


def unpacked(made: Handmade, launch: fx.Node, sizes: Sequence[int] = SIZES) -> list[fx.Node]:
    rows = made.call(aten.view.default, made.wait(launch), [RANKS, -1])
    pieces = made.call(aten.split_with_sizes_copy.default, rows, list(sizes), 1)
    found = []
    for i, (shape, dtype) in enumerate(SHARDS.values()):
        flat = made.call(aten.view.default, made.part(pieces, 2 * i), [-1])
        member = made.call(aten.view.dtype, flat, dtype)
        found.append(made.call(aten.view.default, member, [shape[0] * RANKS, *shape[1:]]))
    return found


def mixed() -> Handmade:
    made = Handmade()
    made.loss(*unpacked(made, made.gather(packed(made))))
    return made


def nodes(made: Handmade, target: object) -> list[fx.Node]:
    return [node for node in made.finish().nodes if node.target is target]


def test_members_of_several_dtypes_are_read_off_their_bytes() -> None:
    reading = mixed().read()
    assert reading.problems == ()
    (bucket,) = reading.buckets
    assert (bucket.dtype, bucket.numel, bucket.bytes, bucket.parts) == (BYTE, 104, 104, 2)
    assert [(m.fqn, m.offset, m.numel, m.dtype, m.precision) for m in bucket.members] == [
        ("a", 0, 6, WHOLE, 23),
        ("b", 24, 3, HALF, 7),
        ("c", 32, 5, HALF, 7),
        ("d", 44, 2, WHOLE, 23),
    ]
    assert [fqn for _, _, fqn in reading.computes] == list("abcd")


def swapped(values: Sequence[Any], i: int, j: int) -> list[Any]:
    out = list(values)
    out[i], out[j] = out[j], out[i]
    return out


def test_two_members_swapped_on_one_side_show() -> None:
    made = mixed()
    (pack,) = nodes(made, aten.cat.default)
    pack.args = (swapped(pack.args[0], 0, 3),)
    problems = made.read().problems
    assert problems
    assert all("reads gathered bytes that are no parameter in its order" in problem for problem in problems)


def test_members_of_one_size_swapped_on_one_side_show() -> None:
    made = Handmade()
    shards = [made.param(fqn, 2, dtype=dtype) for fqn, dtype in zip("abc", (WHOLE, HALF, HALF), strict=True)]
    launch = made.gather(made.call(aten.cat.default, [as_bytes(made, shards[i]) for i in (0, 2, 1)]))
    rows = made.call(aten.view.default, made.wait(launch), [RANKS, -1])
    pieces = made.call(aten.split_with_sizes_copy.default, rows, [8, 4, 4], 1)
    made.loss(*(made.call(aten.view.dtype, made.part(pieces, i), dtype) for i, dtype in enumerate((WHOLE, HALF, HALF))))
    reading = made.read()
    assert reading.problems == ()
    assert [fqn for _, _, fqn in reading.computes] == ["a", "c", "b"]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([24, 0, 8, 0, 10, 2, 8, 0], id="the gap counts as the member before it"),
        pytest.param([20, 4, 6, 2, 10, 2, 8, 0], id="a member too short"),
        pytest.param([24, 2, 6, 0, 10, 2, 8, 0], id="a gap before the member instead of behind it"),
        pytest.param([24, 0, 6, 1, 10, 3, 8, 0], id="one byte off"),
    ],
)
def test_a_split_that_is_some_bytes_off_shows_though_all_sizes_add_up(sizes: list[int]) -> None:
    made = mixed()
    (split,) = nodes(made, aten.split_with_sizes_copy.default)
    split.args = (split.args[0], sizes, 1)
    try:
        problems = made.read().problems
    except PassError as error:  # the bytes make no tensor of that shape
        problems = (str(error),)
    assert problems


@pytest.mark.parametrize("pads", [[0, 0], [0, 4], [2, 0], [1, 1]])
def test_a_wrong_pad_shows_though_the_split_is_right(pads: list[int]) -> None:
    made = mixed()
    pad = nodes(made, aten.constant_pad_nd.default)[0]
    pad.args = (pad.args[0], pads)
    for split in nodes(made, aten.split_with_sizes_copy.default):
        last = SIZES[-2] + sum(pads) - 2
        split.args = (split.args[0], [*SIZES[:-2], last, 0], 1)
    try:
        problems = made.read().problems
    except PassError as error:
        problems = (str(error),)
    assert problems


def test_members_padded_with_something_else_than_zeros_are_not_followed() -> None:
    made = mixed()
    pad = nodes(made, aten.constant_pad_nd.default)[0]
    pad.args = (*pad.args, 1)
    assert any("constant_pad_nd" in problem and "it pads with 1" in problem for problem in made.read().problems)


def test_members_padded_with_negative_zeros_have_other_bits() -> None:
    made = mixed()
    pad = nodes(made, aten.constant_pad_nd.default)[0]
    pad.args = (*pad.args, -0.0)
    assert any("constant_pad_nd" in problem and "it pads with -0.0" in problem for problem in made.read().problems)


def test_bits_read_as_another_dtype_are_told() -> None:
    made = mixed()
    view = next(node for node in nodes(made, aten.view.dtype) if node.args[1] == HALF)
    view.args = (view.args[0], torch.float16)
    reading = made.read()
    assert reading.problems == ()
    assert reading.seen_as == (("b", "bfloat16 as float16"),)
    assert mixed().read().seen_as == ()


def test_a_sum_of_bytes_is_not_followed() -> None:
    made = Handmade()
    gradient = made.compute(made.batch(4, 2))
    made.returns(made.call(aten.view.dtype, made.reduced(made.call(aten.view.dtype, gradient, BYTE)), WHOLE), fqn="a")
    assert any("it reduces torch.float32 seen as torch.uint8" in problem for problem in made.read().problems)


def test_elements_seen_as_smaller_ones_and_back_are_followed() -> None:
    made = Handmade()
    halves = made.call(aten.view.dtype, made.gathered(made.param("a", 2, 2)), torch.int16)
    made.loss(made.call(aten.view.dtype, halves, WHOLE))
    reading = made.read()
    assert (reading.problems, reading.seen_as) == ((), ())


def test_a_cast_of_elements_seen_as_others_is_not_followed() -> None:
    made = Handmade()
    halves = made.call(aten.view.dtype, made.gathered(made.param("a", 2, 2)), torch.int16)
    made.loss(made.call(aten._to_copy.default, halves, dtype=WHOLE))
    assert any("it casts torch.int16 that other elements are seen as" in problem for problem in made.read().problems)


def test_complex_numbers_that_were_computed_here_are_sent_as_real_ones() -> None:
    """As rotary embeddings make them, of keys that go to other ranks."""
    made = Handmade()
    turned = made.compute(made.given("batch", "keys", 8, 4, dtype=torch.complex64))
    real = made.call(aten._to_copy.default, made.call(aten.view_as_real.default, turned), dtype=torch.bfloat16)
    made.loss(made.gathered(real))
    reading = made.read()
    assert reading.problems == ()
    (bucket,) = reading.buckets
    assert (bucket.numel, bucket.dtype) == (128, torch.bfloat16)


def test_complex_numbers_of_a_parameter_are_not_sent_as_real_ones_unsaid() -> None:
    made = Handmade()
    seen = made.call(aten.view_as_real.default, made.param("w", 8, 4, dtype=torch.complex64))
    made.loss(made.gathered(made.call(aten._to_copy.default, seen, dtype=torch.bfloat16)))
    says = "it casts torch.float32 that other elements are seen as to torch.bfloat16"
    assert any(says in problem for problem in made.read().problems)
