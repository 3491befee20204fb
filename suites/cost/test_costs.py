"""Seconds of nodes by what a cluster can do: the longer of operations and bytes, collectives by the ranks of their group."""

from __future__ import annotations

from dataclasses import replace
from operator import getitem

import pytest
import torch

from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.cost.costs import Roofline, collective_seconds, groups_of, transfer_seconds
from pytest_fxbucket.step.mesh import Mesh, fake_mesh, mesh_with
from suites.graph.handmade import Handmade, aten
from suites.simulate.timed_graphs import Timed

CLUSTER = Cluster(
    name="c",
    flops={"float32": 1e12, "bfloat16": 1e13},
    memory_bandwidth=1e11,
    memory=1e12,
    devices_per_node=2,
    within=Link(1e10, 1e-6),
    between=Link(1e9, 5e-6),
    least=1e-9,
)


def roofline(cluster: Cluster = CLUSTER) -> Roofline:
    return Roofline(cluster, lambda group, count: range(count))


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, 1e12), (torch.bfloat16, 1e13), (torch.float64, 1e12)])
def test_a_large_product_takes_as_long_as_its_operations(dtype: torch.dtype, rate: float) -> None:
    made = Handmade()
    a, b = made.given("batch", "a", 1024, 4096, dtype=dtype), made.given("batch", "b", 4096, 2048, dtype=dtype)
    node = made.call(aten.mm.default, a, b)
    assert roofline()(node) == pytest.approx(2 * 1024 * 4096 * 2048 / rate)
    assert roofline(replace(CLUSTER, compute_efficiency=0.5))(node) == pytest.approx(2 * 2 * 1024 * 4096 * 2048 / rate)


def test_attention_takes_as_long_as_its_products_on_a_cpu_too() -> None:
    """Where steps are traced for any cluster: scores and what they weigh; backward computes the scores again, and four more."""
    made, heads = Handmade(), (2, 4, 1024, 64)
    query, key, value = (made.batch(*heads) for _ in range(3))
    both = made.call(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value)
    out, sums = (made.call(getitem, both, place) for place in range(2))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    product = 2 * 2 * 4 * 1024 * 1024 * 64
    assert roofline()(both) == pytest.approx(2 * product / 1e12)
    node = made.call(backward, out, query, key, value, out, sums, 0.0, False)
    assert roofline()(node) == pytest.approx(5 * product / 1e12)


def test_what_goes_to_one_neighbour_takes_the_slowest_link_of_the_ring() -> None:
    made, exchange = Handmade(), torch.ops._c10d_functional.all_to_all_single.default
    to_next = made.call(exchange, made.batch(1000), [0, 0, 1000], [0, 1000, 0], "0")
    to_all = made.call(exchange, made.batch(999), [333] * 3, [333] * 3, "0")
    on_nodes = Roofline(CLUSTER, lambda group, count: range(3))
    assert on_nodes(to_next) == transfer_seconds(4000, 2, 0, CLUSTER) == pytest.approx(5e-6 + 4000 / 1e9)
    assert on_nodes(to_all) == collective_seconds("all_to_all", 3996, range(3), CLUSTER)


def test_a_thin_product_takes_as_long_as_its_bytes() -> None:
    made = Handmade()
    node = made.call(aten.mm.default, made.batch(1, 4096), made.batch(4096, 4096))
    assert roofline()(node) == pytest.approx(4 * (4096 + 4096 * 4096 + 4096) / 1e11)


def test_what_multiplies_nothing_takes_as_long_as_its_bytes() -> None:
    made = Handmade()
    node = made.call(aten.add.Tensor, made.batch(1000), made.batch(1000))
    assert roofline()(node) == pytest.approx(3 * 4000 / 1e11)
    assert roofline(replace(CLUSTER, memory_efficiency=0.25))(node) == pytest.approx(4 * 3 * 4000 / 1e11)


def test_a_row_that_is_expanded_is_read_once() -> None:
    made = Handmade()
    row = made.call(aten.expand.default, made.batch(1, 1000), [500, 1000])
    node = made.call(aten.neg.default, row)
    assert roofline()(node) == pytest.approx((4000 + 500 * 4000) / 1e11)


def test_of_a_table_only_the_rows_that_are_looked_up_are_read() -> None:
    made = Handmade()
    rows = made.call(aten.arange.default, 3)
    for node in (
        made.call(aten.embedding.default, made.batch(4096, 1000), rows),
        made.call(aten.index.Tensor, made.batch(4096, 1000), [rows]),
    ):
        assert roofline()(node) == pytest.approx((2 * 3 * 4000 + 3 * 8) / 1e11)


def test_a_fused_update_takes_as_long_as_all_that_it_reads_and_writes() -> None:
    made = Handmade()
    lists = [[made.batch(1000), made.batch(3000)] for _ in range(4)]
    steps = [made.batch(1), made.batch(1)]
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    node = made.call(aten._fused_adamw.default, *lists, [], steps, **settings)
    assert roofline()(node) == pytest.approx((4 + 4) * 16000 / 1e11, rel=1e-3)


def test_no_kernel_takes_less_than_any_does_and_views_take_nothing() -> None:
    made = Handmade()
    given = made.batch(4)
    assert roofline(replace(CLUSTER, least=1e-5))(made.call(aten.neg.default, given)) == 1e-5
    free = [given, made.call(aten.view.default, given, [2, 2]), made.wait(made.gather(given))]
    assert [roofline(replace(CLUSTER, least=1e-5))(node) for node in free] == [0.0, 0.0, 0.0]


def test_a_collective_takes_what_its_ranks_need_for_its_larger_side() -> None:
    mesh = mesh_with({"dp_replicate": 2, "dp_shard": 4, "tp": 1})
    made = Timed()
    with fake_mesh(mesh, 5):
        nodes = {
            name: made.gather(made.shard(256), mesh.degree(name), mesh.group(name).name)
            for name in ("dp_replicate", "dp_shard")
        }
        step = replace(made.step(), mesh=mesh.dims, rank=5)
        cost = Roofline(CLUSTER, groups_of(step))
        found = {name: cost(node) for name, node in nodes.items()}
    assert found == {
        "dp_replicate": collective_seconds("all_gather", 2 * 1024, Mesh(mesh.dims).ranks(5, "dp_replicate"), CLUSTER),
        "dp_shard": collective_seconds("all_gather", 4 * 1024, (4, 5, 6, 7), CLUSTER),
    }
    assert found["dp_replicate"] == pytest.approx(5e-6 + 1024 / 1e9), "its two ranks are on two nodes"


def test_a_reduction_counts_what_it_is_given() -> None:
    made = Handmade(ranks=2)
    node = made.reduce(made.batch(1024))
    assert roofline()(node) == collective_seconds("reduce_scatter", 4096, range(2), CLUSTER)
