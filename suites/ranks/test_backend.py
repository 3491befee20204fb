"""Which back end runs where, and which GPUs there are, on machines as nvidia-smi would tell of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fxbucket.backends import BACKENDS, NAMES, BackendChoice, Machine, choose
from pytest_fxbucket.ranks import device, machine
from pytest_fxbucket.ranks.machine import gpus, has_mps, loaded_nccl, nvidia_smi, spread, this_machine, use_device, version_of

TWO_AND_A_SLICE = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-91f1b8a5-02a5-3f4c-8a9f-6d1c6e2d9f10)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
"""
FIRST = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
SECOND = "GPU-91f1b8a5-02a5-3f4c-8a9f-6d1c6e2d9f10"
SLICE = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


OLD, NEW = (2, 29, 7), (2, 30, 3)
TOO_OLD = (
    "; NCCL 2.29.7 gives each rank its own, from 2.30 on ranks share: install nvidia-nccl-cu12 or -cu13, and name its "
    "libnccl.so.2 in LD_PRELOAD"
)


def machine_with(count: int, nccl: tuple[int, ...] | None = NEW, *, has_cuda: bool = True) -> Machine:
    return Machine(tuple(f"GPU-{index}" for index in range(count)), has_cuda, nccl)


class TestChoose:
    @pytest.mark.parametrize(
        ("asked", "world", "here", "choice"),
        [
            ("auto", 4, machine_with(4), BackendChoice("nccl", ranks_on_gpu=1)),
            ("auto", 4, machine_with(1), BackendChoice("nccl", ranks_on_gpu=4)),
            ("auto", 4, machine_with(3), BackendChoice("nccl", ranks_on_gpu=2)),
            ("auto", 4, machine_with(3, OLD), BackendChoice("gloo", f"nccl needs 4 GPUs, this machine has 3{TOO_OLD}")),
            ("auto", 2, machine_with(0, None, has_cuda=False), BackendChoice("gloo", "nccl needs 2 GPUs, this machine has 0")),
            ("auto", 2, machine_with(2, has_cuda=False), BackendChoice("gloo", "nccl needs a torch that was built with CUDA")),
            ("nccl", 1, machine_with(1, OLD), BackendChoice("nccl", ranks_on_gpu=1)),
            ("nccl", 4, machine_with(4, OLD), BackendChoice("nccl", ranks_on_gpu=1)),
            ("nccl", 4, machine_with(0), BackendChoice(None, "nccl needs 1 GPU, this machine has 0")),
            ("nccl", 4, machine_with(0, OLD), BackendChoice(None, "nccl needs 4 GPUs, this machine has 0")),
            ("nccl", 17, machine_with(1), BackendChoice(None, "nccl needs 2 GPUs, this machine has 1 for 16 ranks each")),
            ("nccl", 2, machine_with(2, None), BackendChoice(None, "nccl needs a torch that was built with NCCL")),
            ("gloo:cuda", 4, machine_with(1), BackendChoice("gloo:cuda", ranks_on_gpu=4)),
            ("gloo:cuda", 4, machine_with(1, None), BackendChoice("gloo:cuda", ranks_on_gpu=4)),
            ("gloo:cuda", 4, machine_with(0), BackendChoice(None, "gloo:cuda needs 1 GPU, this machine has 0")),
            ("gloo", 4, machine_with(8), BackendChoice("gloo")),
            ("local", 4, machine_with(0), BackendChoice("local")),
        ],
    )
    def test_what_is_asked_for_meets_what_is_there(self, asked: str, world: int, here: Machine, choice: BackendChoice) -> None:
        assert choose(asked, world, here) == choice

    def test_a_plan_says_how_many_ranks_share_a_gpu(self) -> None:
        assert choose("nccl", 4, machine_with(4), 2) == BackendChoice("nccl", ranks_on_gpu=2)
        assert BACKENDS["nccl"].gpus_to_lease(4, machine_with(4), 2) == 2
        too_few = "nccl needs 3 GPUs, this machine has 2 for 2 ranks each ([run] ranks_per_gpu)"
        assert choose("auto", 5, machine_with(2), 2) == BackendChoice("gloo", too_few)
        assert choose("gloo:cuda", 5, machine_with(2), 2).lacking == f"gloo:cuda{too_few.removeprefix('nccl')}"
        assert choose("nccl", 4, machine_with(1), 1).lacking.startswith("nccl needs 4 GPUs, this machine has 1 for 1 rank each")

    def test_ranks_that_share_a_gpu_are_not_timed(self) -> None:
        alone, sharing = choose("nccl", 2, machine_with(2)), choose("nccl", 2, machine_with(1))
        assert alone.for_timing() == alone
        assert sharing.for_timing() == BackendChoice(
            None,
            "nccl puts 2 ranks on a GPU, where kernels take turns, which says nothing of step time; "
            "use a GPU for each rank, or gloo",
        )

    def test_only_ranks_on_gpus_lease_any(self) -> None:
        assert {name: BACKENDS[name].gpus_to_lease(4, machine_with(8)) for name in NAMES} == {
            "gloo": 0,
            "gloo:cuda": 4,
            "nccl": 4,
            "local": 0,
            "fake": 0,
        }
        assert BACKENDS["gloo:cuda"].gpus_to_lease(4, machine_with(3)) == 3
        assert BACKENDS["nccl"].gpus_to_lease(4, machine_with(1, OLD)) == 4

    def test_nccls_ranks_have_equal_parts_of_a_gpu_and_others_a_place_each(self) -> None:
        assert [BACKENDS["nccl"].places(ranks) for ranks in (1, 2, 3, 8, 16)] == [16, 16, 15, 16, 16]
        assert [BACKENDS["gloo:cuda"].places(ranks) for ranks in (1, 3, 20)] == [1, 3, 16]

    @pytest.mark.parametrize(("number", "version"), [(23007, (2, 30, 7)), (21805, (2, 18, 5)), (2804, (2, 8, 4))])
    def test_nccl_gives_its_version_as_a_number(self, number: int, version: tuple[int, ...]) -> None:
        assert version_of(number) == version

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

        assert this_machine({"CUDA_VISIBLE_DEVICES": ""}) == Machine((), torch.version.cuda is not None, loaded_nccl())

    @pytest.mark.skipif(shutil.which("cc") is None, reason="makes a library of its own, and there is no C compiler here")
    def test_of_nccl_the_library_that_is_loaded_counts(self, tmp_path: Path) -> None:
        """One that says 2.31.4, loaded as LD_PRELOAD would."""
        source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
        source.write_text("int ncclGetVersion(int *version) { *version = 23104; return 0; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source], check=True)
        code = (
            "import torch.distributed as dist; dist.is_nccl_available = lambda: True\n"
            "from pytest_fxbucket.ranks.machine import loaded_nccl; print(loaded_nccl())"
        )
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "(2, 31, 4)"

    @pytest.mark.parametrize(("status", "runs"), [(0, True), (1, False), (None, False)])
    def test_the_multi_process_service_is_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, runs: bool
    ) -> None:
        if status is not None:
            program = tmp_path / "nvidia-cuda-mps-control"
            program.write_text(f"#!/bin/sh\ngrep -q get_server_list && exit {status}\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
        has_mps.cache_clear()
        assert has_mps() is runs
        has_mps.cache_clear()

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
