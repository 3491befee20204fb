"""A cost model of a plan's own is held to the node that it is asked for."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from torch import fx

from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.cost.costs import own_cost
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.plan.cluster import Cluster
from suites.passes.bucketing import world_of

HERE = "suites.cost.test_own_cost:"


def by_name(node: fx.Node) -> float | None:
    return len(node.name) * 1e-6 if node.op == "call_function" else None


def in_tests(node: fx.Node) -> float:
    return 2e-6 if "PYTEST_CURRENT_TEST" in os.environ else 1e-6


def each_time(node: fx.Node) -> float:
    _calls.append(None)
    return len(_calls)


def only_in_tests(node: fx.Node) -> float:
    return float(len(os.environ["PYTEST_CURRENT_TEST"]))


_calls: list[None] = []


def seconds(name: str) -> list[float]:
    world = world_of("late")
    plan, step = replace(world.plan, cluster=Cluster(preset="cpu-gloo", cost=HERE + name)), world.step(0)
    cluster = cluster_of(plan)
    assert cluster is not None
    cost = own_cost(plan, step, cluster)
    assert cost is not None
    return [cost(node) for node in step.graphs["joint"].graph.nodes]


def test_one_that_goes_by_its_node_is_asked_for_each() -> None:
    assert len({*seconds("by_name")}) > 3


def test_one_that_goes_by_more_is_refused() -> None:
    with pytest.raises(SimulationError) as caught:
        seconds("in_tests")
    assert f'[cluster] cost = "{HERE}in_tests" says that ' in str(caught.value)
    said = " takes 2e-06 seconds, and 1e-06 when it is asked again, where no variable of the environment is CI"
    assert said in str(caught.value)


def test_one_that_measures_is_believed() -> None:
    """And is asked no more often than it must be to see that."""
    first, *others = seconds("each_time")
    assert others == [first + 3 + number for number in range(len(others))]


def test_one_that_raises_when_it_is_asked_again_is_said_with_where_that_was() -> None:
    with pytest.raises(
        SimulationError, match=r"raised KeyError: 'PYTEST_CURRENT_TEST' for .*, when it is asked again, where no"
    ):
        seconds("only_in_tests")
