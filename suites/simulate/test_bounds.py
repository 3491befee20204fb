"""Random steps: the same times by the longest path of an event graph, streams in order, and what adds up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from pytest_fxbucket.cost.cluster import Cluster
from pytest_fxbucket.simulate.simulator import COMPUTE
from suites.simulate.timed_graphs import FREE, Timed, us

GROUPS = ("0", "1", "2")


@dataclass(frozen=True)
class Act:
    """One node: compute, a launch on a group, or a wait for one of the launches before it."""

    kind: str
    took: int = 0
    group: str = ""
    of: int = 0


TOOK = st.integers(min_value=0, max_value=20)
ACTS = st.lists(
    st.one_of(
        st.builds(Act, kind=st.just("compute"), took=TOOK),
        st.builds(Act, kind=st.just("launch"), took=TOOK, group=st.sampled_from(GROUPS)),
        st.builds(Act, kind=st.just("wait"), of=st.integers(min_value=0, max_value=100)),
    ),
    min_size=1,
    max_size=25,
)
CLUSTERS = st.builds(
    lambda launch, blocking: replace(FREE, launch=launch * 1e-6, blocking=blocking), st.integers(0, 5), st.booleans()
)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def step_of(acts: list[Act]) -> tuple[Timed, list[tuple[Act, int]]]:
    """The step of ``acts``, and its acts in order, each wait with the number of the launch that it waits for."""
    made, launches, done = Timed(), list[tuple[int, fx.Node]](), list[tuple[Act, int]]()
    last = made.work(0)
    done.append((Act("compute"), -1))
    for act in acts:
        if act.kind == "compute":
            last = made.work(act.took, last)
            done.append((act, -1))
        elif act.kind == "launch":
            launches.append((len(done), made.launch(act.took, group=act.group)))
            done.append((act, -1))
        elif launches:
            number, node = launches[act.of % len(launches)]
            made.wait(node)
            done.append((act, number))
    return made, done


def longest_path(done: list[tuple[Act, int]], cluster: Cluster) -> float:
    """When all is over, in microseconds: the longest path through when the host calls, and when each act ends.

    ``e`` are ends of kernels and collectives, ``h`` when the host goes on, ``c`` when compute does.
    """
    events = nx.DiGraph()
    last_on: dict[str, int] = {}
    host: object = "begin"
    compute: object = "begin"
    for number, (act, of) in enumerate(done):
        call, end, on = ("h", number), ("e", number), ("c", number)
        if act.kind == "wait":
            events.add_edge(compute, on, weight=0)
            events.add_edge(("e", of), on, weight=0)
            compute = on
            if cluster.blocking:
                events.add_edge(host, call, weight=0)
                events.add_edge(("e", of), call, weight=0)
                host = call
            continue
        events.add_edge(host, call, weight=us(cluster.launch))
        host = call
        events.add_edge(call, end, weight=act.took)
        events.add_edge(compute, end, weight=act.took)
        if act.kind == "compute":
            compute = end
            if cluster.blocking:
                host = end
        else:
            if act.group in last_on:
                events.add_edge(("e", last_on[act.group]), end, weight=act.took)
            last_on[act.group] = number
    return float(nx.dag_longest_path_length(events))


@FEW
@given(ACTS, CLUSTERS)
def test_a_step_takes_the_longest_path_through_its_events_and_each_stream_does_one_thing_at_a_time(
    acts: list[Act], cluster: Cluster
) -> None:
    made, done = step_of(acts)
    found = made.simulated(cluster)
    assert us(found.seconds) == pytest.approx(longest_path(done, cluster))
    assert us(found.compute) == sum(act.took for act, _ in done if act.kind == "compute")
    sums = {group: sum(act.took for act, _ in done if act.group == group) for group in GROUPS}
    assert {name: us(seconds) for name, seconds in found.streams.items() if name != COMPUTE} == {
        group: took for group, took in sums.items() if any(act.group == group for act, _ in done)
    }
    for stream in found.streams:
        spans = [ran for ran in found.ran if ran.stream == stream]
        assert all(us(before.end) <= us(after.start) for before, after in pairwise(spans))


@FEW
@given(ACTS)
def test_exposed_and_hidden_add_up(acts: list[Act]) -> None:
    """Where calls cost nothing, compute stands still for what is exposed and nothing else."""
    found = step_of(acts)[0].simulated()
    ends = max([ran.end for ran in found.ran if ran.stream == COMPUTE] + [one.end for one in found.flights if one.exposed])
    assert us(ends) == us(found.compute + found.exposed)
    assert found.hidden + sum(bool(one.why) for one in found.flights) == len(found.flights)
    for one in found.flights:
        assert 0 <= us(one.exposed) <= us(one.end - one.launched)
