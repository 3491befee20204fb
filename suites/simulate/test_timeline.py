"""Steps whose timeline is known to the microsecond, and why each collective is exposed; when nodes run: ``test_bounds.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.cost.cluster import Cluster
from pytest_fxbucket.cost.costs import checked
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.simulate.simulator import COPIES, simulate
from suites.simulate.timed_graphs import FREE, Timed, aten, only, us

CALLS = replace(FREE, launch=2e-6)
"""Each call costs the host two microseconds."""


def spans(timed: Timed, cluster: Cluster = FREE) -> list[tuple[float, float]]:
    """When each kernel and each collective ran, in the order of the calls."""
    return [(us(ran.start), us(ran.end)) for ran in timed.simulated(cluster).ran]


def test_a_collective_beside_enough_compute_is_hidden() -> None:
    made = Timed()
    flying = made.launch(10)
    made.work(12)
    made.work(1, made.wait(flying))
    found = made.simulated()
    assert (us(found.seconds), us(found.compute), us(found.exposed), found.hidden) == (13, 13, 0, 1)
    assert (only(found).is_hidden, only(found).why) == (True, "")


def test_a_collective_beside_too_little_compute_holds_it_up_for_the_rest() -> None:
    made = Timed()
    flying = made.launch(10)
    made.work(6)
    made.work(5, made.wait(flying))
    found = made.simulated()
    assert spans(made) == [(0, 10), (0, 6), (10, 15)]
    assert (us(found.seconds), us(found.compute), us(found.exposed), found.hidden) == (15, 11, 4, 0)
    assert (us(only(found).waited), only(found).why) == (6, "too little compute")


def test_a_collective_starts_when_the_kernels_before_it_have_run() -> None:
    made = Timed()
    made.launch(10, made.work(6))
    assert spans(made) == [(0, 6), (6, 16)]


def test_what_could_have_been_launched_before_is_launched_too_late() -> None:
    made = Timed()
    made.work(6)
    made.work(1, made.wait(made.launch(10)))
    flight = only(made.simulated())
    assert (us(flight.launched), us(flight.exposed), flight.why) == (6, 10, "launched too late")


def test_what_is_sent_at_once_and_read_at_once_has_too_little_compute() -> None:
    made = Timed()
    made.work(1, made.wait(made.launch(10, made.work(6))))
    flight = only(made.simulated())
    assert (us(flight.exposed), flight.why) == (10, "too little compute")


def test_what_is_read_long_behind_its_wait_is_waited_for_too_early() -> None:
    made = Timed()
    ready = made.wait(made.launch(10))
    made.work(6)
    made.work(1, ready)
    flight = only(made.simulated())
    assert (us(flight.exposed), flight.why) == (10, "waited for too early")


def test_what_nothing_reads_could_be_waited_for_at_the_end() -> None:
    made = Timed()
    made.wait(made.launch(10, made.work(6)))
    made.work(6)
    flight = only(made.simulated())
    assert (us(flight.exposed), flight.why) == (10, "waited for too early")


def test_what_flies_before_it_only_since_it_is_late_is_not_why() -> None:
    made = Timed()
    made.work(20)
    made.launch(4)
    made.work(1, made.wait(made.launch(10)))
    last = made.simulated().flights[-1]
    assert (us(last.launched), us(last.start), us(last.exposed), last.why) == (20, 24, 14, "launched too late")


@pytest.mark.parametrize(
    ("kernel", "why"), [(aten.clone.default, "launched too late"), (aten.neg.default, "too little compute")]
)
def test_a_pack_of_what_is_there_can_stand_anywhere_and_compute_cannot(kernel: Any, why: str) -> None:
    made = Timed()
    shard = made.shard()
    made.work(20)
    made.work(1, made.wait(made.launch(10, made.timed(made.call(kernel, shard), 1))))
    flight = only(made.simulated())
    assert (us(flight.launched), us(flight.exposed), flight.why) == (21, 10, why)


def test_a_little_late_is_not_why() -> None:
    made = Timed()
    made.work(4)
    made.work(1, made.wait(made.launch(10)))
    assert only(made.simulated()).why == "too little compute", "4 of 10 would have been saved"


def test_a_launch_queues_behind_the_one_before_it_on_its_group() -> None:
    made = Timed()
    first, second = made.launch(10), made.launch(10)
    made.work(10)
    made.work(1, made.wait(first))
    made.work(1, made.wait(second))
    found = made.simulated()
    assert [(us(one.start), us(one.end), us(one.exposed), one.why, one.behind) for one in found.flights] == [
        (0, 10, 0, "", ""),
        (10, 20, 9, "behind another launch", first.name),
    ]


def test_a_collective_that_is_waited_for_twice_holds_up_once() -> None:
    made = Timed()
    flying = made.launch(10)
    first = made.wait(flying)
    made.work(2, first)
    made.wait(flying)
    made.work(2, first)
    flight = only(made.simulated())
    assert (us(flight.exposed), us(flight.waited)) == (10, 0)


def test_a_step_ends_when_the_last_stream_does() -> None:
    made = Timed()
    made.launch(10)
    made.work(1)
    found = made.simulated()
    assert (us(found.seconds), us(found.exposed), us(only(found).waited)) == (10, 0, 10)


def test_views_and_waits_cost_nothing() -> None:
    made = Timed()
    seen = made.call(aten.view.default, made.given_in, [2, 2])
    made.work(1, made.call(aten.t.default, seen))
    assert spans(made, CALLS) == [(2, 3)]


def test_a_launch_that_does_not_fit_any_earlier_is_memorys() -> None:
    made = Timed()
    big = made.timed(made.call(aten.repeat.default, made.given_in, [1000]), 6)  # 16,000 bytes, which are gone before the launch
    made.work(0, big)
    made.work(1, made.wait(made.launch(10, made.shard(1000))))  # gathers 16,000 bytes
    assert only(made.simulated()).why == "launched too late"
    peak = made.simulated().peak_bytes
    assert only(made.simulated(replace(FREE, memory=peak))).why == "memory"
    assert only(made.simulated(replace(FREE, memory=peak + 16_000))).why == "launched too late"


def test_what_a_launch_sends_is_there_and_only_its_result_has_to_fit() -> None:
    def made(*, early: bool) -> Timed:
        made = Timed()
        sent = made.timed(made.call(aten.repeat.default, made.given_in, [1000]), 0)  # 16,000 bytes, of which 4,000 come back
        if not early:
            made.work(20)
        launch = made.timed(made.reduce(sent), 10)
        if early:
            made.work(20)
        made.work(1, made.wait(launch))
        return made

    needed, late = made(early=True).simulated().peak_bytes, made(early=False)
    assert only(late.simulated(replace(FREE, memory=needed))).why == "launched too late"
    assert only(late.simulated(replace(FREE, memory=needed - 1))).why == "memory"


def from_host() -> tuple[Timed, fx.Node]:
    """A graph that begins with a copy to the device, which takes ten microseconds."""
    made = Timed()
    with made.mode:
        made.given_in.meta["val"] = torch.empty(4, device="cpu")
    return made, made.timed(made.call(aten._to_copy.default, made.given_in, device="cuda"), 10)


def test_compute_waits_for_a_copy_that_it_reads_a_view_of() -> None:
    made, copied = from_host()
    made.work(1, made.call(aten.view.default, copied, [2, 2]))
    assert spans(made)[-1] == (10, 11)


def test_a_launch_waits_for_a_copy_that_it_sends() -> None:
    made, copied = from_host()
    made.work(1, made.wait(made.launch(5, copied)))
    assert spans(made)[-2:] == [(10, 15), (15, 16)]


def test_copies_to_the_host_have_a_stream_of_their_own() -> None:
    made = Timed()
    with made.mode:
        made.given_in.meta["val"] = torch.empty(4, device="cuda")
    first = made.timed(made.call(aten._to_copy.default, made.given_in, device="cpu"), 10)
    made.work(3)
    made.timed(made.call(aten._to_copy.default, made.given_in, device="cpu"), 10)
    made.work(1, first)
    found = made.simulated()
    assert [(ran.stream, us(ran.start), us(ran.end)) for ran in found.ran] == [
        (COPIES, 0, 10),
        ("compute", 0, 3),
        (COPIES, 10, 20),
        ("compute", 10, 11),
    ]


def test_graphs_of_a_step_run_one_after_the_other() -> None:
    first, second = Timed(), Timed()
    first.work(3)
    second.work(4)
    one, other = first.step(), second.step()
    step = replace(
        one,
        graphs={"forward": one.graphs["joint"], "backward": other.graphs["joint"]},
        inputs={"forward": one.inputs["joint"], "backward": other.inputs["joint"]},
        outputs={"forward": (), "backward": ()},
    )
    found = simulate(step, FREE, lambda node: 3e-6 if node.graph is first.graph else 4e-6)
    assert [(ran.phase, us(ran.start), us(ran.end)) for ran in found.ran] == [("forward", 0, 3), ("backward", 3, 7)]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "1", None])
def test_a_cost_that_is_no_number_of_seconds_is_told_in_one_sentence(seconds: object) -> None:
    made = Timed()
    node = made.work(1)
    with pytest.raises(SimulationError) as caught:
        simulate(made.step(), FREE, checked(lambda _: seconds, "mine:cost"))
    assert str(caught.value) == (
        f"mine:cost says that {node.name} (aten.neg.default) takes {seconds!r} seconds, expected 0 or more"
    )


def test_what_a_cost_of_ones_own_does_not_know_the_estimate_tells() -> None:
    made = Timed()
    made.work(1)
    known = made.work(2)
    cost = checked(lambda node: 7e-6 if node.name == known.name else None, "mine:cost", made.cost)
    assert us(simulate(made.step(), FREE, cost).seconds) == 8


def test_a_cost_that_raises_is_told_in_one_sentence() -> None:
    made = Timed()
    node = made.work(1)
    with pytest.raises(SimulationError, match=rf"^mine:cost raised KeyError: 'x' for {node.name} \(aten.neg.default\)$"):
        simulate(made.step(), FREE, checked(lambda _: {}["x"], "mine:cost"))
