"""torch's own two classes for tests on several processes, doing the least there is on 4 gloo ranks; run by ranks.py.

``python suites/benchmarks/torch_classes.py NAME`` prints seconds as JSON: what -> a list. torch is imported before the clock
starts, though a parent that uses these classes must import it. Rank 0 is the one that is killed: a test of
MultiProcessTestCase passes when another is.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import sys
import time
import unittest
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

WORLD = 4
WARM = 100
CRASHES = 2


class Shared(MultiProcContinuousTest):
    world_size = WORLD

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_nothing(self):
        pass

    def test_all_reduce(self):
        dist.all_reduce(torch.ones(3))

    def test_kill(self):
        if self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Continuous(Shared):
    pass


class Again(Shared):
    pass


class EachTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return WORLD

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def join(self):
        store = dist.FileStore(self.file_name, WORLD)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=WORLD)

    def test_nothing(self):
        self.join()

    def test_all_reduce(self):
        self.join()
        dist.all_reduce(torch.ones(3))

    def test_kill(self):
        self.join()
        if self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def seconds(case: type[unittest.TestCase], method: str, *, fails: bool = False) -> float:
    """Wall seconds of one test without its class's set-up, which is empty in both."""
    begin = time.perf_counter()
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()):
        case(method).run(result)
    elapsed = time.perf_counter() - begin
    if result.wasSuccessful() is fails or result.skipped:
        sys.exit(f"{case.__name__}.{method} went otherwise: {result.errors} {result.failures} {result.skipped}")
    return elapsed


def continuous() -> dict[str, list[float]]:
    """First test, warm ones, and from a killed rank to the first test of the class that comes next."""
    found = {"start": [seconds(Continuous, "test_nothing")]}
    found["nothing"] = [seconds(Continuous, "test_nothing") for _ in range(WARM)]
    found["all_reduce"] = [seconds(Continuous, "test_all_reduce") for _ in range(WARM)]
    # A test that fails spoils the rest of its class: they are skipped. A death is noticed after a quarter of the time limit.
    crash = seconds(Continuous, "test_kill", fails=True)
    found["respawn"] = [crash + seconds(Again, "test_nothing")]
    Again.tearDownClass()
    for process in Continuous.processes:
        process.kill()
    return found


def each_test() -> dict[str, list[float]]:
    """New processes for each test, so that a warm one costs what the first does, and so does the one after a crash."""
    start = seconds(EachTest, "test_nothing")
    crashes = [seconds(EachTest, "test_kill", fails=True) + seconds(EachTest, "test_nothing") for _ in range(CRASHES)]
    return {
        "start": [start],
        "nothing": [seconds(EachTest, "test_nothing") for _ in range(CRASHES)],
        "all_reduce": [seconds(EachTest, "test_all_reduce") for _ in range(CRASHES)],
        "respawn": crashes,
    }


CLASSES: dict[str, Callable[[], dict[str, list[float]]]] = {
    "MultiProcContinuousTest": continuous,
    "MultiProcessTestCase": each_test,
}

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(CLASSES[sys.argv[1]]()), flush=True)
    os._exit(0)
