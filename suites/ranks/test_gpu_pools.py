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
    (tmp_path / "modes").touch()
    listed = "".join(f"echo 'GPU {i}: X (UUID: {uuid})'\n" for i, uuid in enumerate(GPUS))
    program.write_text(f"#!/bin/sh\nif [ $1 != -L ]; then exec cat {tmp_path}/modes; fi\n{listed}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(machine, "has_mps", lambda: False)
    nvidia_smi.cache_clear()
    yield tmp_path / "locks"
    for pool in pools._alive:
        if pool.has_gpus:
            pool.close()
    nvidia_smi.cache_clear()


@pytest.fixture
def sharing_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """This torch has an NCCL that lets ranks share a GPU; it seems so, until a rank calls it."""
    monkeypatch.setattr(machine, "loaded_nccl", lambda: (2, 30, 7))


def free(folder: Path) -> int:
    """How many GPUs could be leased now."""
    for count in (2, 1):
        try:
            machine.take(count, GPUS, limit_s=0, folder=folder).release()
        except RankError:
            continue
        return count
    return 0


@pytest.mark.usefixtures("sharing_nccl")
def test_too_few_gpus_are_said_with_both_numbers(folder: Path, pools: Pools) -> None:
    with pytest.raises(RankError, match=r"nccl needs 3 GPUs, this machine has 2 for 1 rank each \(\[run\] ranks_per_gpu\)$"):
        pools.get(3, "nccl", 1).run("suites.ranks.jobs:on_gpu", [None] * 3, timeout_s=60)


@pytest.mark.usefixtures("sharing_nccl")
@pytest.mark.parametrize(("ranks_per_gpu", "gpus", "left"), [(0, 2, 0), (1, 2, 0), (8, 1, 12), (3, 1, 5)])
def test_nccls_ranks_leave_others_what_their_plan_says(
    folder: Path, pools: Pools, ranks_per_gpu: int, gpus: int, left: int
) -> None:
    lease = pools.lease(2, "nccl", ranks_per_gpu)
    assert lease.gpus == GPUS[:gpus]
    if left:
        machine.take(1, GPUS[:1], places=left, limit_s=0, folder=folder).release()
    with pytest.raises(RankError, match="could not be leased within 0 s"):
        machine.take(1, GPUS[:1], places=left + 1, limit_s=0, folder=folder)
    lease.release()


def test_a_gpu_that_takes_one_process_is_leased_whole_and_never_shared(folder: Path, pools: Pools) -> None:
    (folder.parent / "modes").write_text(f"{GPUS[0]}, Exclusive_Process\n{GPUS[1]}, Default\n")
    with pytest.raises(RankError, match="gloo:cuda needs 3 GPUs, this machine has 2; GPU-fake-0 takes one process at a time"):
        pools.get(3, "gloo:cuda").run("suites.ranks.jobs:on_gpu", [None] * 3, timeout_s=60)
    lease = pools.lease(1, "gloo:cuda", 0)
    assert (lease.gpus, free(folder)) == (GPUS[:1], 1)
    with pytest.raises(RankError, match="could not be leased within 0 s"):
        machine.take(1, GPUS[:1], places=1, limit_s=0, folder=folder)
    lease.release()


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
@pytest.mark.usefixtures("sharing_nccl")
def test_ranks_that_cannot_start_give_their_gpus_back(folder: Path, pools: Pools) -> None:
    with pytest.raises(RankFailure, match="back end nccl needs a torch that was built with CUDA and NCCL"):
        pools.get(2, "nccl").run("suites.ranks.jobs:on_gpu", [None] * 2, timeout_s=60)
    assert free(folder) == 2
