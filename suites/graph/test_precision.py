"""Bits of mantissa that a value keeps on its way through a launch."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from pytest_fxbucket.graph.contents import EXACT
from suites.graph.handmade import Handmade, aten


@pytest.mark.parametrize(
    ("dtype", "before", "after", "bits"),
    [
        (torch.float32, [], [torch.bfloat16], 7),
        (torch.float32, [torch.int32, torch.float32], [], 0),
        (torch.float32, [torch.float8_e4m3fn, torch.float32], [], 3),
        (torch.int32, [], [], EXACT),
        (torch.complex64, [], [], 23),
        (torch.complex64, [torch.complex32, torch.complex64], [], 10),
        (torch.complex64, [torch.float32, torch.complex64], [], 0),
        (torch.complex64, [torch.int32, torch.complex64], [], 0),
        (torch.float32, [], [torch.complex64], 23),
    ],
    ids=[
        *("cast after the gather", "cast to integers", "cast to eight bits", "integers", "complex", "narrower complex"),
        *("real part of complex", "complex as integers", "cast to complex after the gather"),
    ],
)
def test_bits_that_are_lost_anywhere_count(
    dtype: torch.dtype, before: list[torch.dtype], after: list[torch.dtype], bits: int
) -> None:
    made = Handmade()
    node = made.param("a", 2, 2, dtype=dtype)
    for one in before:
        node = made.call(aten._to_copy.default, node, dtype=one)
    node = reduce(lambda wide, one: made.call(aten._to_copy.default, wide, dtype=one), after, made.gathered(node))
    made.loss(node)
    assert made.read().buckets[0].members[0].precision == bits
