"""Collectives of every kind, members of every shape, on real ranks before and after the pass, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.ranks.pools import Pools
from suites.passes.on_ranks import HALVES, compare
from suites.passes.programs import COLUMNS, Program, aten, c10d, equal_with, through

WORLDS = pytest.mark.parametrize("world", [2, 3, 4])
Build = Callable[[Program], list[fx.Node]]


def gathers(made: Program) -> list[fx.Node]:
    return [made.neg(made.gather(p)) for p in made.shards("pqr")]


def gathers_into(made: Program) -> list[fx.Node]:
    return [made.neg(made.gather_into(p, made.buffer_for(p))) for p in made.shards("pqr")]


def averages(made: Program) -> list[fx.Node]:
    return [made.reduce(made.neg(x), "avg") for x in made.fulls("xyz")]


def sums(made: Program) -> list[fx.Node]:
    return [made.reduce(x) for x in made.fulls("xyz")]


def largest(made: Program) -> list[fx.Node]:
    return [made.reduce(x, "max") for x in made.fulls("xyz")]


def all_reduced(made: Program) -> list[fx.Node]:
    return [made.all_reduce(made.neg(x), "avg") for x in made.shards("xyz")]


def all_summed(made: Program) -> list[fx.Node]:
    return [made.all_reduce(x) for x in made.shards("xyz", dtype=torch.int64)]


def coalesced(kind: str) -> Build:
    def build(made: Program) -> list[fx.Node]:
        shape = (2 * made.world, COLUMNS)
        first, second = made.shards("pqr", *shape), made.shards("stu", *shape)
        alone = {"all_gather": made.gather, "reduce_scatter": made.reduce, "all_reduce": made.all_reduce}[kind]
        return [*made.coalesced(kind, first), *made.coalesced(kind, second[:2]), alone(second[2])]

    return build


@WORLDS
@pytest.mark.parametrize(
    ("build", "operator"),
    [
        (gathers, "all_gather_into_tensor"),
        (gathers_into, "all_gather_into_tensor"),
        (averages, "reduce_scatter_tensor"),
        (sums, "reduce_scatter_tensor"),
        (largest, "reduce_scatter_tensor"),
        (all_reduced, "all_reduce"),
        (all_summed, "all_reduce"),
        (coalesced("all_gather"), "all_gather_into_tensor"),
        (coalesced("reduce_scatter"), "reduce_scatter_tensor"),
        (coalesced("all_reduce"), "all_reduce"),
    ],
)
def test_launches_of_each_kind_become_one(pools: Pools, world: int, build: Build, operator: str) -> None:
    passed = equal_with(pools, Program(world), build)
    assert passed.launches() == [operator]
    assert passed.report.left_alone == ()


@WORLDS
def test_sum_and_average_are_never_mixed(pools: Pools, world: int) -> None:
    passed = equal_with(
        pools, Program(world), lambda made: [*sums(made), *(made.reduce(made.add(x, 1.0), "avg") for x in made.fulls("uvw"))]
    )
    assert len(passed.launches()) == 2


@WORLDS
def test_kinds_are_never_mixed(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        p, q, x, y = *made.shards("pq"), *made.fulls("xy")
        return [f(node) for node in (x, y) for f in (made.reduce, made.all_reduce)] + [made.gather(p), made.gather(q)]

    assert sorted(equal_with(pools, Program(world), build).launches()) == [
        "all_gather_into_tensor",
        "all_reduce",
        "reduce_scatter_tensor",
    ]


@WORLDS
@pytest.mark.parametrize("build", [gathers, sums, all_summed])
def test_groups_of_one_rank_are_left_alone_and_said(pools: Pools, world: int, build: Build) -> None:
    class Alone(Program):
        def ranks(self, group: str) -> int:
            return super().ranks("alone")

    made = Alone(world, {"alone": [[rank] for rank in range(world)]})
    gm = made.returns(*build(made))
    for node in gm.graph.nodes:
        if collectives.launch_kind(node) is not None:
            node.update_arg(len(node.args) - 1, "alone")
    passed = through(made, gm)
    assert compare(pools, passed.before, passed.after, world, groups=made.groups) == []
    assert len(passed.launches()) == 3
    assert passed.reasons == ["its process group has one rank"]


@pytest.mark.parametrize("group", ["halves", "strided"])
@pytest.mark.parametrize("form", ["gather", "reduce", "all_reduce"])
def test_groups_within_the_world_are_kept_and_kept_apart(pools: Pools, group: str, form: str) -> None:
    """At 4 ranks, rank 2 is number 1 of [0, 2], rank 1 is number 0 of [1, 3]."""

    def build(made: Program) -> list[fx.Node]:
        nodes = made.shards("pqrs", 4, COLUMNS)
        launched = getattr(made, form)
        return [launched(node, group=name) for node, name in zip(nodes, [group, "0", group, "0"], strict=True)]

    passed = equal_with(pools, Program(4, HALVES[4]), build)
    assert len(passed.launches()) == 2
    assert sorted(bucket.group for bucket in passed.report.buckets) == ["0", group]


def _shaped(made: Program, *shapes: tuple[int, ...]) -> list[fx.Node]:
    return [made.given(f"p{i}", *shape) for i, shape in enumerate(shapes)]


@WORLDS
@pytest.mark.parametrize("form", ["gather", "reduce", "all_reduce"])
def test_empty_and_odd_sized_members_come_out_as_they_would_alone(pools: Pools, world: int, form: str) -> None:
    n = 1 if form == "gather" else world
    shapes = [(n, 5), (0, 3), (3 * n,), (n, 0), (n, 1, 7), (2 * n, 3)]

    def build(made: Program) -> list[fx.Node]:
        return [getattr(made, form)(node) for node in _shaped(made, *shapes)]

    assert len(equal_with(pools, Program(world), build).launches()) == 1


@WORLDS
def test_members_that_are_all_empty_come_out_empty(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        p, q = _shaped(made, (0, 3), (0, 5))
        return [made.gather(p), made.gather(q), made.reduce(p), made.reduce(q), made.all_reduce(p), made.all_reduce(q)]

    equal_with(pools, Program(world), build)


@WORLDS
def test_zero_dimensional_members_are_reduced(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        return [made.all_reduce(node, "avg") for node in _shaped(made, (), (2, 3), (), (0,))]

    assert len(equal_with(pools, Program(world), build).launches()) == 1


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 gathers and scatters nothing strided, without a pass neither"
)
@WORLDS
@pytest.mark.parametrize("form", ["gather", "reduce", "all_reduce"])
def test_strided_members_come_out_as_they_would_alone(pools: Pools, world: int, form: str) -> None:
    """Transposed, a column, expanded, every other row, permuted."""

    def build(made: Program) -> list[fx.Node]:
        p, q, r, s, t = _shaped(made, (3, 2 * world), (world, 4), (1, 3), (2 * world, 3), (2, world, 3))
        views = [
            made.call(aten.t.default, p),
            made.call(aten.slice.Tensor, q, 1, 1, 2),
            made.call(aten.expand.default, r, [world, 3]),
            made.call(aten.slice.Tensor, s, 0, 0, 2 * world, 2),
            made.call(aten.permute.default, t, [1, 0, 2]),
        ]
        return [getattr(made, form)(view) for view in views]

    assert len(equal_with(pools, Program(world), build).launches()) == 1


def casts(graph: fx.Graph) -> list[fx.Node]:
    names = ("aten::_to_copy", "prims::convert_element_type")
    return [node for node in graph.nodes if (op := overload(node)) is not None and op._schema.name in names]


@WORLDS
@pytest.mark.parametrize("form", ["gather", "reduce", "all_reduce"])
@pytest.mark.parametrize("cast", ["_to_copy", "convert_element_type"])
def test_casts_before_the_launch_become_one(pools: Pools, world: int, form: str, cast: str) -> None:
    def build(made: Program) -> list[fx.Node]:
        found = []
        for node in made.shards("pqr", world, COLUMNS):
            if cast == "_to_copy":
                node = made.call(aten._to_copy.default, node, dtype=torch.bfloat16)
            else:
                node = made.call(torch.ops.prims.convert_element_type.default, node, torch.bfloat16)
            found.append(getattr(made, form)(node))
        return found

    passed = equal_with(pools, Program(world), build)
    assert len(passed.launches()) == 1
    assert len(casts(passed.after.graph)) == 1


@WORLDS
def test_a_cast_that_somebody_else_reads_stays(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        halved = [made.call(aten._to_copy.default, p, dtype=torch.bfloat16) for p in made.shards("pqr")]
        return [*(made.gather(node) for node in halved), made.neg(halved[1])]

    passed = equal_with(pools, Program(world), build)
    assert len(passed.launches()) == 1


@WORLDS
def test_a_cast_whose_source_is_written_before_the_launch_keeps_the_old_value(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        p, q = made.shards("pq")
        halved = [made.call(aten._to_copy.default, node, dtype=torch.bfloat16) for node in (p, q)]
        made.call(aten.add_.Tensor, p, 1.0)
        return [made.gather(node) for node in halved]

    assert len(equal_with(pools, Program(world), build).launches()) == 1


@WORLDS
def test_collectives_that_no_bucket_takes_stay_and_are_said(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        x, y, z = made.fulls("xyz")
        split = [2] * world
        exchanged = made.wait(made.call(c10d.all_to_all_single.default, x, split, split, "0"))
        sent = made.wait(made.call(c10d.broadcast.default, y, 0, "0"))
        return [exchanged, sent, made.all_reduce_in_place(z), *gathers(made)]

    passed = equal_with(pools, Program(world), build)
    assert sorted(passed.launches()) == ["all_gather_into_tensor", "all_reduce_", "all_to_all_single", "broadcast"]
    assert [reason.split(".default")[0].rpartition(".")[2] for reason in passed.reasons] == [
        "all_reduce_",
        "all_to_all_single",
        "broadcast",
    ]
