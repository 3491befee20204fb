"""Back end ``fake``: every rank in turn in one process, in fake groups that move no data; any number of ranks."""

from __future__ import annotations

import contextlib
import math

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.ranks import calling, flight_recorder
from pytest_fxbucket.ranks.single_process.local import Answer, JobOrder, Surroundings, answer


def run(rank: int, world: int, order: JobOrder) -> list[Answer]:
    """Call the order's function once as each rank, up to the first that fails; answers in rank order."""
    with contextlib.suppress(Exception):  # it fails again in rank 0, which says so
        calling.load(order.function)
    start = Surroundings.take()
    answers: list[Answer] = []
    for one in range(len(order.payloads)):
        flight_recorder.act_as(one)
        try:
            with fake_world(one, len(order.payloads)):
                answers.append(answer(order, one))
        finally:
            start.put_back()
        if answers[-1].outcome != "returned":
            break
    # Later than any that has failed.
    left = len(order.payloads) - len(answers)
    return answers + [Answer("was not begun", math.inf)] * left
