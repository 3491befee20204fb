"""All-gathers on a process group of their own: the same program, on other groups, on real ranks."""

from __future__ import annotations

import pytest
from torch import fx

from pytest_fxbucket.compat.c10d import fake_world, group_ranks, twin_name
from pytest_fxbucket.fuzz.program import HALVES, Program, aten, copied
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.passes.new_nodes import set_argument
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import encode_module

JOBS = "suites.passes.rank_jobs_of_passes"


def a_step() -> fx.GraphModule:
    """A gather of each kind, and a reduction."""
    made = Program(2)
    shard, full = made.given("shard", 2, 3), made.given("full", 4, 3)
    (several,) = made.coalesced("all_gather", [shard])
    plain, into = made.gather(shard), made.gather_into(shard, made.buffer_for(shard))
    return made.returns(plain, several, made.call(aten.neg.default, into), made.reduce(full))


def on_own(graph_module: fx.GraphModule) -> fx.GraphModule:
    result = copied(graph_module)
    for node in result.graph.nodes:
        if (said := collectives.read_launch(node)) is not None and said.kind == "all_gather":
            set_argument(node, "group_name", twin_name(said.group))
    result.recompile()
    return result


def groups_of(graph: fx.Graph) -> list[tuple[str, str]]:
    said = [collectives.read_launch(node) for node in graph.nodes]
    return [(launch.operator, launch.group) for launch in said if launch is not None]


def test_all_gathers_alone_change_their_group_and_only_once() -> None:
    once = on_own(a_step())

    assert groups_of(once.graph) == [
        ("all_gather_into_tensor_coalesced", "0:gather"),
        ("all_gather_into_tensor", "0:gather"),
        ("all_gather_into_tensor_out", "0:gather"),
        ("reduce_scatter_tensor", "0"),
    ]
    assert encode_module(on_own(once)) == encode_module(once)


def test_where_no_group_was_made_its_ranks_are_known_all_the_same() -> None:
    with fake_world(1, 3):
        assert group_ranks("0:gather") == (0, 1, 2)
        with pytest.raises(KeyError):
            group_ranks("7:gather")


def test_a_twin_of_no_group_is_an_error() -> None:
    graph = on_own(a_step()).graph
    for node in graph.nodes:
        if collectives.launch_kind(node) is not None:
            node.args = tuple("7:gather" if argument == "0:gather" else argument for argument in node.args)

    with fake_world(0, 2), pytest.raises(KeyError, match="7"):
        ensure_twins(graph)


@pytest.mark.parametrize(("backend", "kind"), [("gloo", "ordered_gloo"), ("local", "fxbucket_local")])
def test_ranks_compute_the_same_on_one_group_more_job_after_job(pools: Pools, backend: str, kind: str) -> None:
    step = a_step()
    graphs = (encode_module(step), encode_module(on_own(step)))

    for _ in range(2):
        results = pools.get(2, backend).run(f"{JOBS}:both", [graphs] * 2, timeout_s=60)

        assert results == [([True] * 4, (0, 1), kind, 2)] * 2


def test_groups_that_cross_are_made_without_waiting_for_each_other(pools: Pools) -> None:
    made = Program(4, HALVES[4])
    x = made.given("x", 1)
    graph = encode_module(on_own(made.returns(made.gather(x, "halves"), made.gather(x, "strided"))))

    results = pools.get(4).run(f"{JOBS}:crossed", [graph] * 4, timeout_s=60)

    assert results == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
