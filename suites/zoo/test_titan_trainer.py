"""A plan's step is torchtitan's own, bit for bit, as its parallelize function and its clipping make it."""

from __future__ import annotations

import os

import pytest

from suites.warm.runs import WarmRuns
from suites.zoo.installed import installed
from suites.zoo.visit import ROOT


@pytest.fixture(scope="module")
def printed(warm_runs: WarmRuns) -> dict[str, list[str]]:
    """Lines of each module, by a process of its own, which has the libraries on its path."""
    ran = warm_runs.run(["-m", "suites.zoo.titan_both"], ROOT, os.environ)
    assert ran.returncode in (0, 1), ran.stderr  # 1: a part broke off, and has a traceback among its lines
    parts = [part.splitlines() for part in ran.stdout.split("# suites.zoo.")[1:]]
    return {name: lines for name, *lines in parts}


@installed
def test_torchtitans_own_step_is_the_plans(printed: dict[str, list[str]]) -> None:
    ring, copies = printed["titan_trainer"]
    assert ring.startswith("round a ring: passed: 107 tensors a step")
    assert copies.startswith("two copies of two, in bfloat16: passed: 107 tensors a step")


@installed
def test_trainers_of_torchtitan_and_transformers_are_captured_as_they_are(printed: dict[str, list[str]]) -> None:
    assert printed["titan_captured"] == [
        "torchtitan: 2 steps as eager's; 61 launches, bucketed 11",
        "transformers: 2 steps as eager's; 121 launches, bucketed 17",
    ]
