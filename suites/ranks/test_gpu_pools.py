"""Pools lease GPUs for their ranks, and give them back; nvidia-smi is a script, and this torch may have no CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pytest_fxbucket.backends import PLACES
from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks import machine
from pytest_fxbucket.ranks.failure import RankFailure
from pytest_fxbucket.ranks.machine import nvidia_smi
from pytest_fxbucket.ranks.pools import Pools

GPUS = ("GPU-fake-0", "GPU-fake-1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: Pools) -> Iterator[Path]:
    """A machine that says it has two GPUs, and a folder of its own for their locks; none is leased for longer than a test."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: X (UUID: {uuid})'\n" for i, uuid in enumerate(GPUS)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "FOLDER", tmp_path / "locks")
    nvidia_smi.cache_clear()
    yield tmp_path / "locks"
    for pool in pools._alive:
        if pool.has_gpus:
            pool.close()
    nvidia_smi.cache_clear()


def free(folder: Path) -> int:
    """How many GPUs could be leased now."""
    for count in (2, 1):
        try:
            machine.take(count, GPUS, limit_s=0, folder=folder).release()
        except RankError:
            continue
        return count
    return 0


def test_too_few_gpus_are_said_with_both_numbers(folder: Path, pools: Pools) -> None:
    with pytest.raises(RankError, match="nccl needs 3 GPUs, this machine has 2"):
        pools.get(3, "nccl").run("suites.ranks.jobs:rank_and_world", [None] * 3, timeout_s=60)


def test_ranks_see_their_own_gpu_and_the_pool_keeps_it(folder: Path, pools: Pools) -> None:
    pool = pools.get(3, "gloo:cuda")  # needs no CUDA as long as no tensor is made there
    seen = pool.run("suites.ranks.jobs:on_gpu", [None] * 3, timeout_s=60)
    assert [(device, gpu) for device, gpu, *_ in seen] == [("cuda:0", GPUS[rank % 2]) for rank in range(3)]
    assert {(workspace, mode) for *_, workspace, mode in seen} == {(":4096:8", 2)}
    assert free(folder) == 0
    pool.close()
    assert free(folder) == 2


def test_ranks_of_two_runs_share_gpus_while_there_are_places(folder: Path, pools: Pools) -> None:
    pools.get(3, "gloo:cuda", 2).run("suites.ranks.jobs:on_gpu", [None] * 3, timeout_s=60)
    assert free(folder) == 0
    rest = machine.take(2, GPUS, places=PLACES - 2, limit_s=0, folder=folder)
    with pytest.raises(RankError, match="could not be leased within 0 s"):
        machine.take(1, GPUS, places=1, limit_s=0, folder=folder)
    rest.release()


def test_an_idle_pool_gives_back_what_others_wait_for(folder: Path, pools: Pools) -> None:
    pools.get(1, "gloo:cuda").run("suites.ranks.jobs:on_gpu", [None], timeout_s=60)
    pools.give_back()
    assert free(folder) == 1
    queue = machine._locked(folder / f"queue-{GPUS[0]}", machine.fcntl.LOCK_EX)
    assert queue is not None
    pools.give_back()
    machine._unlock(queue)
    assert free(folder) == 2


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA: what is tested is one that was not")
def test_ranks_that_cannot_start_give_their_gpus_back(folder: Path, pools: Pools) -> None:
    with pytest.raises(RankFailure, match="back end nccl needs a torch that was built with CUDA and NCCL"):
        pools.get(2, "nccl").run("suites.ranks.jobs:on_gpu", [None] * 2, timeout_s=60)
    assert free(folder) == 2
