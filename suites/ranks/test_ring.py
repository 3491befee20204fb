"""Sums round a ring have the bits of NCCL's ring, played message by message, over gloo and on back end local."""

from __future__ import annotations

import pytest
import torch

from pytest_fxbucket.ranks.process_groups.sums import RingOrder

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
