"""Collectives of every kind, members of every shape and dtype, caps and byte orders: on all ranks the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.program import COLUMNS, HALVES, Program, aten
from suites.passes import programs
from suites.passes.programs import Passed

Build = Callable[[Program], list[fx.Node]]
Equal = Callable[..., Passed]
FORMS = pytest.mark.parametrize("form", ["gather", "reduce", "all_reduce"])


def gathers(made: Program) -> list[fx.Node]:
    return [made.neg(made.gather(p)) for p in made.shards("pqr")]


def gathers_into(made: Program) -> list[fx.Node]:
    return [made.neg(made.gather_into(p, made.buffer_for(p))) for p in made.shards("pqr")]


def averages(made: Program) -> list[fx.Node]:
    return [made.reduce(made.neg(x), "avg") for x in made.fulls("xyz")]


def sums(made: Program) -> list[fx.Node]:
    return [made.reduce(x) for x in made.fulls("uvw")]


def largest(made: Program) -> list[fx.Node]:
    return [made.reduce(x, "max") for x in made.fulls("xyz")]


def all_reduced(made: Program) -> list[fx.Node]:
    return [made.all_reduce(made.neg(x), "avg") for x in made.shards("xyz")]


def all_summed(made: Program) -> list[fx.Node]:
    return [made.all_reduce(x) for x in made.shards("lmn", dtype=torch.int64)]


def coalesced(kind: str) -> Build:
    def build(made: Program) -> list[fx.Node]:
        shape = (2 * made.world, COLUMNS)
        first, second = made.shards("pqr", *shape), made.shards("stu", *shape)
        alone = {"all_gather": made.gather, "reduce_scatter": made.reduce, "all_reduce": made.all_reduce}[kind]
        return [*made.coalesced(kind, first), *made.coalesced(kind, second[:2]), alone(second[2])]

    return build


def several_dtypes(made: Program) -> list[fx.Node]:
    """Odd element counts: what comes behind a bfloat16 member must be aligned."""
    dtypes = [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float64]
    shapes = [(1, 3), (5,), (3, 1), (1, 7), (1,), (1, 3)]
    given = [made.given(f"p{i}", *shape, dtype=dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    return [made.gather(node) for node in given]


def reductions_of_several_dtypes(made: Program) -> list[fx.Node]:
    nodes = [*made.fulls("xy"), *made.fulls("uv", dtype=torch.bfloat16)]
    return [f(node) for f in (made.reduce, made.all_reduce) for node in nodes]


GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


@pytest.mark.parametrize(
    ("build", "options", "launches"),
    [
        (gathers, {}, [GATHER]),
        (gathers_into, {}, [GATHER]),
        (averages, {}, [SCATTER]),
        (largest, {}, [SCATTER]),
        (all_reduced, {}, [REDUCE]),
        (all_summed, {}, [REDUCE]),
        (coalesced("all_gather"), {}, [GATHER]),
        (coalesced("reduce_scatter"), {}, [SCATTER]),
        (coalesced("all_reduce"), {}, [REDUCE]),
        (lambda made: [*sums(made), *averages(made)], {}, [SCATTER] * 2),
        (lambda made: [*sums(made), *all_summed(made), *gathers(made)], {}, [SCATTER, REDUCE, GATHER]),
        (several_dtypes, {}, [GATHER] * 5),
        (several_dtypes, {"dtypes": "mixed"}, [GATHER]),
        (reductions_of_several_dtypes, {"dtypes": "mixed"}, [SCATTER] * 2 + [REDUCE] * 2),
    ],
)
def test_launches_that_can_be_one_become_one_and_no_others(
    made: Program, equal: Equal, build: Build, options: dict[str, Any], launches: list[str]
) -> None:
    passed = equal(build(made), settings=[options])
    assert sorted(passed.launches) == sorted(launches)
    assert passed.report.left_alone == ()


@pytest.mark.parametrize("group", ["halves", "strided"])
@FORMS
def test_groups_within_the_world_are_kept_and_kept_apart(group: str, form: str) -> None:
    """At 4 ranks, rank 2 is number 1 of [0, 2], rank 1 is number 0 of [1, 3]."""
    made = Program(4, HALVES[4])
    names = [group, "0", group, "0"]
    found = [getattr(made, form)(x, group=name) for x, name in zip(made.shards("pqrs", 4, COLUMNS), names, strict=True)]
    passed = programs.equal(made, found, settings=[{}])
    assert len(passed.launches) == 2
    assert sorted(bucket.group for bucket in passed.report.buckets) == ["0", group]


def odd(made: Program, form: str) -> list[fx.Node]:
    n = 1 if form == "gather" else made.world
    shapes: list[tuple[int, ...]] = [(n, 5), (0, 3), (3 * n,), (n, 0), (n, 1, 7), (2 * n, 3)]
    return shaped(made, *shapes, *([()] if form == "all_reduce" else []))


def empty(made: Program, form: str) -> list[fx.Node]:
    return shaped(made, (0, 3), (0,), (made.world, 0))


def strided(made: Program, form: str) -> list[fx.Node]:
    """Transposed, a column, expanded, every other row, permuted."""
    world = made.world
    p, q, r, s, t = shaped(made, (3, 2 * world), (world, 4), (1, 3), (2 * world, 3), (2, world, 3))
    return [
        made.call(aten.t.default, p),
        made.call(aten.slice.Tensor, q, 1, 1, 2),
        made.call(aten.expand.default, r, [world, 3]),
        made.call(aten.slice.Tensor, s, 0, 0, 2 * world, 2),
        made.call(aten.permute.default, t, [1, 0, 2]),
    ]


def shaped(made: Program, *shapes: Sequence[int]) -> list[fx.Node]:
    return [made.given(f"p{i}", *shape) for i, shape in enumerate(shapes)]


needs_strided_collectives = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 gathers and scatters nothing strided, without a pass neither"
)


@FORMS
@pytest.mark.parametrize("members", [odd, empty, pytest.param(strided, marks=needs_strided_collectives)])
def test_members_of_any_shape_come_out_as_they_would_alone(
    made: Program, equal: Equal, form: str, members: Callable[[Program, str], list[fx.Node]]
) -> None:
    passed = equal([getattr(made, form)(node) for node in members(made, form)], settings=[{}])
    assert len(passed.launches) == 1


def test_a_cast_whose_source_is_written_before_the_launch_keeps_the_old_value(made: Program, equal: Equal) -> None:
    p, q, r, s = made.shards("pqrs")
    halved = [made.call(aten._to_copy.default, node, dtype=torch.bfloat16) for node in (p, q, r, s)]
    made.call(aten.add_.Tensor, p, 1.0)
    first = [made.gather(node) for node in halved[:2]]
    made.module = "b"
    passed = equal([*first, *(made.gather(node) for node in halved[2:])], ["a", "b"], settings=[{}])
    assert len(passed.launches) == 2
    casts = passed.after.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert len(casts) == 3, "those of b became one"


def test_a_cap_counts_the_larger_side_of_a_launch(made: Program, equal: Equal) -> None:
    """2 x 3 floats a rank, on each rank: 24 bytes; a bucket of two members fits, one of three does not."""
    nodes = [*(made.gather(p) for p in made.shards("pqrst")), *(made.reduce(x) for x in made.fulls("uvxyz"))]
    cap = 2 * 24 * made.world / (1 << 20)
    passed = equal(nodes, settings=[{"cap_mb": (cap,)}])
    assert sorted(len(bucket.members) for bucket in passed.report.buckets) == [1, 1, 2, 2, 2, 2]
    assert len(programs.through(made, passed.before, cap_mb=(cap * 0.999,)).launches) == 10


def test_neighbours_fill_buckets_without_a_plan(made: Program, equal: Equal) -> None:
    size = 24 * made.world / (1 << 20)
    nodes = [made.gather(p) for p in made.shards("pqrstuvw")]
    passed = equal(nodes, settings=[{"by": "size", "cap_mb": (size, 2 * size, 4 * size)}])
    assert [len(bucket.members) for bucket in passed.report.buckets] == [1, 2, 4, 1]


@pytest.mark.parametrize(("layout", "members"), [("registration", "pqr"), ("execution", "rqp")])
def test_either_byte_order_gives_the_same_values(made: Program, equal: Equal, layout: str, members: str) -> None:
    nodes = [made.gather(p) for p in reversed(made.shards("pqr"))] + [made.reduce(x) for x in reversed(made.fulls("xyz"))]
    passed = equal(nodes, settings=[{"layout": layout}])
    assert passed.report.buckets[0].members == tuple(members)
