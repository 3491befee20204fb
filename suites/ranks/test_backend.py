"""Which back end runs where, and which GPUs there are, on machines as nvidia-smi would tell of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fxbucket.backends import BACKENDS, NAMES, BackendChoice, Machine, choose
from pytest_fxbucket.ranks import device, machine
from pytest_fxbucket.ranks.machine import gpus, nvidia_smi, spread, this_machine, use_device

TWO_AND_A_SLICE = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-91f1b8a5-02a5-3f4c-8a9f-6d1c6e2d9f10)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
"""
FIRST = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
SECOND = "GPU-91f1b8a5-02a5-3f4c-8a9f-6d1c6e2d9f10"
SLICE = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


def machine_with(count: int, *, has_cuda: bool = True, has_nccl: bool = True) -> Machine:
    return Machine(tuple(f"GPU-{index}" for index in range(count)), has_cuda, has_nccl)


class TestChoose:
    @pytest.mark.parametrize(
        ("asked", "world", "here", "choice"),
        [
            ("auto", 4, machine_with(4), BackendChoice("nccl")),
            ("auto", 4, machine_with(3), BackendChoice("gloo", "nccl needs 4 GPUs, this machine has 3")),
            ("auto", 2, machine_with(0, has_cuda=False), BackendChoice("gloo", "nccl needs 2 GPUs, this machine has 0")),
            ("auto", 2, machine_with(2, has_cuda=False), BackendChoice("gloo", "nccl needs a torch that was built with CUDA")),
            ("nccl", 1, machine_with(1), BackendChoice("nccl")),
            ("nccl", 4, machine_with(0), BackendChoice(None, "nccl needs 4 GPUs, this machine has 0")),
            ("nccl", 1, machine_with(0), BackendChoice(None, "nccl needs 1 GPU, this machine has 0")),
            ("nccl", 2, machine_with(2, has_nccl=False), BackendChoice(None, "nccl needs a torch that was built with NCCL")),
            ("gloo:cuda", 4, machine_with(1), BackendChoice("gloo:cuda")),
            ("gloo:cuda", 4, machine_with(1, has_nccl=False), BackendChoice("gloo:cuda")),
            ("gloo:cuda", 4, machine_with(0), BackendChoice(None, "gloo:cuda needs 1 GPU, this machine has 0")),
            ("gloo", 4, machine_with(8), BackendChoice("gloo")),
            ("local", 4, machine_with(0), BackendChoice("local")),
        ],
    )
    def test_what_is_asked_for_meets_what_is_there(self, asked: str, world: int, here: Machine, choice: BackendChoice) -> None:
        assert choose(asked, world, here) == choice

    def test_only_ranks_on_gpus_lease_any(self) -> None:
        assert {name: BACKENDS[name].gpus_to_lease(4, 8) for name in NAMES} == {
            "gloo": 0,
            "gloo:cuda": 4,
            "nccl": 4,
            "local": 0,
            "fake": 0,
        }
        assert BACKENDS["gloo:cuda"].gpus_to_lease(4, 3) == 3

    def test_ranks_get_the_leased_gpus_in_turn(self) -> None:
        assert spread(("a", "b"), 5) == ("a", "b", "a", "b", "a")
        assert spread((), 2) == ("", "")


class TestGpus:
    @pytest.mark.parametrize(
        ("visible", "found"),
        [
            (None, (FIRST, SECOND)),
            ("0", (FIRST,)),
            ("1,0", (SECOND, FIRST)),
            (" 1 ", (SECOND,)),
            ("GPU-91", (SECOND,)),
            (f"{SECOND},{FIRST}", (SECOND, FIRST)),
            ("MIG-c6d4f1ef", (SLICE,)),
            ("", ()),
            ("-1", ()),
            ("0,7,1", (FIRST,)),
            ("GPU-", ()),  # more than one begins so
            ("0,0", ()),
        ],
    )
    def test_cuda_visible_devices_is_read_as_cuda_reads_it(
        self, visible: str | None, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "nvidia_smi", lambda: TWO_AND_A_SLICE)
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert machine.gpus(environ) == found

    def test_a_machine_without_nvidia_smi_has_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        nvidia_smi.cache_clear()
        assert gpus({}) == ()
        nvidia_smi.cache_clear()

    @pytest.mark.parametrize(("status", "found"), [(0, (FIRST, SECOND)), (9, ())])
    def test_the_program_is_asked_once_and_believed_if_it_succeeds(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, found: tuple[str, ...]
    ) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/asked\ncat <<'END'\n{TWO_AND_A_SLICE}END\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        nvidia_smi.cache_clear()
        assert (gpus({}), gpus({})) == (found, found)
        nvidia_smi.cache_clear()
        assert (tmp_path / "asked").read_text() == "asked\n"

    def test_the_machine_says_what_torch_was_built_with(self) -> None:
        import torch

        assert this_machine({"CUDA_VISIBLE_DEVICES": ""}) == Machine(
            (), torch.version.cuda is not None, torch.distributed.is_nccl_available()
        )

    def test_asking_for_gpus_imports_no_torch(self) -> None:
        code = "import sys; from pytest_fxbucket.ranks.machine import gpus; gpus(); print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"


def test_a_rank_says_where_its_tensors_belong() -> None:
    assert device() == "cpu"
    use_device("cuda:0")
    try:
        assert device() == "cuda:0"
    finally:
        use_device("cpu")
