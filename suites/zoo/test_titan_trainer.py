"""A plan's step is torchtitan's own, bit for bit, as its parallelize function and its clipping make it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from suites.zoo.libraries import FOLDER
from suites.zoo.visit import ROOT


@pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the libraries of the zoo are not installed: make zoo, or make suites, installs them"
)
def test_torchtitans_own_step_is_the_plans_where_bytes_lie_as_fsdp2_lays_them() -> None:
    """In a process of its own, which has torchtitan on its path."""
    command = [sys.executable, "-m", "suites.zoo.titan_trainer"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ring, copies, executed = ran.stdout.splitlines()
    assert ring.startswith("round a ring: passed: 107 tensors a step")
    assert copies.startswith("two copies of two, in bfloat16: passed: 107 tensors a step")
    assert executed.startswith("executed order, round a ring: failed: step 0, rank 0: gradient ")
