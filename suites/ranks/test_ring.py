"""Sums round a ring have the bits of NCCL's ring, played message by message, over gloo and on back end local."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from pytest_fxbucket.ranks.process_groups.sums import ReduceOperation, RingOrder, multiplied_and_added

JOBS = "suites.ranks.ring_jobs:"


RINGS = [(2, 2, 64, 1), (3, 1, 2**21, 1), (3, 4, 48, 1), (4, 3, 256, 2), (8, 4, 2**21, 2), (8, 5, 80, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("backend", "world", "channels", "chunk_bytes", "nodes"), [*(("local", *ring) for ring in RINGS), ("gloo", *RINGS[3])]
)
def test_bits_are_those_of_a_ring_played_step_by_step(pools, backend, world, channels, chunk_bytes, nodes, dtype):
    payload = (dtype, channels, chunk_bytes, nodes)
    for found in pools.get(world, backend).run(JOBS + "as_played", [payload] * world, timeout_s=30):
        assert found == {**dict.fromkeys(found, True), "other than in rank order": world > 2}


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_the_next_job_adds_in_rank_order_again(pools, backend):
    pool = pools.get(3, backend)
    pool.run(JOBS + "as_played", [(torch.float32, 2, 64, 1)] * 3, timeout_s=30)
    assert pool.run(JOBS + "next_job", [None] * 3, timeout_s=30) == [True] * 3


def test_rings_go_through_one_node_after_the_other_and_differ():
    ring = RingOrder(channels=4, chunk_bytes=2**21, ranks_per_node=4)
    orders = [ring.order(channel, range(8)) for channel in range(4)]
    assert orders[:2] == [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6]]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert all({place // 4 for place in order[:4]} == {0} for order in orders)


def test_a_group_with_one_rank_of_each_node_goes_from_node_to_node():
    ring = RingOrder(channels=2, chunk_bytes=2**21, ranks_per_node=2)
    assert ring.order(1, (1, 3, 5)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "bits", "least"), [(torch.float32, 24, -149), (torch.bfloat16, 8, -133)], ids=["fp32", "bf16"]
)
def test_a_share_is_multiplied_and_added_with_one_rounding(dtype, bits, least):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-60, 1, (3, 4000), generator=generator, dtype=torch.float64))
    numbers = torch.randn(3, 4000, generator=generator, dtype=torch.float64) * sizes
    numbers[:, :2000] *= 2.0**-80  # denormals, their products and sums
    numbers[2, ::2] = (numbers[0, ::2].to(dtype) * numbers[1, ::2].to(dtype)).double()  # what comes next to it, or cancels
    numbers[2, ::4] *= -1
    tiny = 2.0**-23
    numbers[:, -1] = torch.tensor(
        [(1 + tiny) / 2**12, (1 - tiny) / 2**12, 1 + tiny]
    )  # just below half way, and on it in float64
    factor, other, addend = numbers.to(dtype).unbind()
    found = multiplied_and_added(factor, other, addend)
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in numbers.to(dtype).T.tolist()]
    assert found.tolist() == [float(nearest(one, bits, least)) for one in exact]
    assert not torch.equal(found, factor * other + addend)


def nearest(exact: Fraction, bits: int, least: int) -> Fraction:
    """The nearest of ``bits`` bits, the last of which stands for no less than 2**least; of two the even one."""
    size = Fraction(2) ** least
    while abs(exact) >= 2**bits * size:
        size *= 2
    return round(exact / size) * size


AT = ((777, 12_288), (1_500_003, 3_000_000))
"""Where 3,072 elements lie in a message of how many, beside one of them alone."""


@pytest.mark.parametrize(
    ("ranks", "dtype", "name", "are_denormal", "on_a_gpu"),
    [
        (2, torch.float32, "AVG", True, [391, 391]),
        (2, torch.bfloat16, "AVG", True, [365, 394]),
        (4, torch.float32, "AVG", True, [718, 689]),
        (4, torch.bfloat16, "AVG", True, [693, 710]),
        (4, torch.float32, "SUM", False, [980, 958]),
        (4, torch.bfloat16, "SUM", False, [1007, 994]),
        (4, torch.bfloat16, "SUM", True, [152, 157]),
    ],
)
def test_as_many_elements_change_with_their_place_as_on_a_gpu(ranks, dtype, name, are_denormal, on_a_gpu):
    """Counted on an H200 with NCCL 2.30.7: all-reduces round one ring, a channel, protocol Simple."""
    ring, width = (
        RingOrder(channels=1, chunk_bytes=2**21, ranks_per_node=ranks),
        torch.int32 if dtype.itemsize == 4 else torch.int16,
    )
    values = [values_of(rank, dtype, are_denormal) for rank in range(ranks)]

    def bits(at: int, size: int) -> torch.Tensor:
        parts = [torch.ones(size, dtype=dtype).index_copy_(0, torch.arange(at, at + 3072), value) for value in values]
        return ring(parts, ReduceOperation(name), range(ranks), None)[at : at + 3072].view(width)

    alone = bits(0, 3072)
    assert [int((bits(*place) != alone).sum()) for place in AT] == on_a_gpu


def values_of(rank: int, dtype: torch.dtype, are_denormal: bool) -> torch.Tensor:
    """What ``rank`` sent there."""
    generator = torch.Generator().manual_seed(7 + rank)
    normal = torch.randn(3072, generator=generator)
    if not are_denormal:
        return normal.to(dtype)
    width, bits = (torch.int32, 23) if dtype is torch.float32 else (torch.int16, 7)
    if dtype is torch.bfloat16:  # these were drawn behind those of float32
        torch.randint(0, 1 << 23, (3072,), generator=generator, dtype=torch.int32)
    return torch.randint(0, 1 << bits, (3072,), generator=generator, dtype=width).view(dtype)
