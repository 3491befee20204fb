"""The lower bound of exposed communication, against every schedule of small steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from suites.benchmarks.lower_bound import COMPUTE, Task, least_exposed, least_makespan

RANDOM_STEPS = 300


def drawn(seed: int) -> list[Task]:
    """A step of up to seven tasks on compute and two streams."""
    draw = random.Random(seed)
    tasks = list[Task]()
    for number in range(draw.randint(2, 7)):
        stream = draw.choice((COMPUTE, COMPUTE, "a", "b", "a"))
        needs = tuple(sorted(draw.sample(range(number), min(number, draw.randint(0, 2)))))
        tasks.append(Task(draw.randint(1, 9), needs, stream, draw.choice(("kept", "kept", "earlier", "free"))))
    return tasks


def orders(tasks: Sequence[Task]) -> Iterator[tuple[int, ...]]:
    """Every order in which a host can call ``tasks`` and that keeps what is to be kept."""
    before = {(needed, number) for number, task in enumerate(tasks) for needed in task.needs}
    compute = [number for number, task in enumerate(tasks) if task.stream == COMPUTE and task.order != "free"]
    before |= {(one, other) for one in compute for other in compute if one < other and tasks[other].order == "kept"}
    for order in permutations(range(len(tasks))):
        place = {number: at for at, number in enumerate(order)}
        if all(place[one] < place[other] for one, other in before):
            yield order


def exposed(tasks: Sequence[Task], order: Sequence[int]) -> float:
    """As the simulator has it: a launch starts behind the compute called before it, and each wait stands where it is needed."""
    free, ends, computed = dict[str, float](), dict[int, float](), 0.0
    for number in order:
        task = tasks[number]
        on_compute = task.stream == COMPUTE
        needed = max((ends[one] for one in task.needs), default=0.0)
        if not on_compute:  # what it sends is waited for on the compute stream
            computed = max(computed, needed)
        start = max(computed, needed, free.get(task.stream, 0.0))
        ends[number] = start + task.seconds
        if on_compute:
            computed = ends[number]
        else:
            free[task.stream] = ends[number]
    return max(ends.values()) - sum(task.seconds for task in tasks if task.stream == COMPUTE)


@pytest.mark.parametrize("part", range(3))
def test_no_order_exposes_less_than_the_bound(part: int) -> None:
    for seed in range(part * RANDOM_STEPS, (part + 1) * RANDOM_STEPS):
        tasks = drawn(seed)
        assert least_exposed(tasks) <= min(exposed(tasks, order) for order in orders(tasks)) + 1e-9, seed


def test_one_gather_before_all_compute_is_exposed_whole() -> None:
    assert least_exposed([Task(3, stream="a"), Task(5, (0,))]) == 3


def test_a_gather_that_is_read_later_hides() -> None:
    assert least_exposed([Task(3, stream="a"), Task(5), Task(5, (0,))]) == 0
    assert least_exposed([Task(7, stream="a"), Task(5), Task(5, (0,))]) == 2


def test_collectives_of_one_stream_queue_and_those_of_two_do_not() -> None:
    assert least_exposed([Task(3, stream="a"), Task(3, stream="a"), Task(1, (0, 1))]) == 6
    assert least_exposed([Task(3, stream="a"), Task(3, stream="b"), Task(1, (0, 1))]) == 3


def test_a_chain_of_collectives_adds_up() -> None:
    assert least_exposed([Task(4), Task(2, (0,), "a"), Task(3, (1,), "b")]) == 5


def test_what_is_cast_for_a_launch_need_not_wait_its_turn() -> None:
    step = [Task(9), Task(1), Task(4, (1,), "a"), Task(9, (2,))]
    assert least_exposed(step) == 4
    assert least_exposed([step[0], Task(1, order="free"), *step[2:]]) == 0


def test_a_cast_of_a_gradient_may_be_earlier_but_is_not_put_off() -> None:
    made, next_one, cast, reduced = Task(5), Task(9), Task(2, (0,), order="earlier"), Task(8, (2,), "a")
    assert least_exposed([made, next_one, replace(cast, order="kept"), reduced]) == 8
    assert least_exposed([made, next_one, cast, reduced]) == 0
    at_the_end = [made, cast, next_one, Task(3, (2,), "a")]
    assert least_exposed(at_the_end) == 3
    assert least_exposed([at_the_end[0], replace(cast, order="free"), *at_the_end[2:]]) == 1


@pytest.mark.parametrize("seed", range(40))
def test_an_interrupted_schedule_ends_no_later_than_any_other(seed: int) -> None:
    draw = random.Random(seed)
    jobs = [(float(draw.randint(0, 9)), float(draw.randint(1, 5)), float(draw.randint(0, 9))) for _ in range(6)]

    def makespan(order: Sequence[tuple[float, float, float]]) -> float:
        now = end = 0.0
        for head, seconds, tail in order:
            now = max(now, head) + seconds
            end = max(end, now + tail)
        return end

    least = least_makespan(jobs)
    assert least <= min(map(makespan, permutations(jobs)))
    assert least >= max(head + seconds + tail for head, seconds, tail in jobs)
    assert least >= min(head for head, _, _ in jobs) + sum(seconds for _, seconds, _ in jobs) + min(tail for _, _, tail in jobs)
