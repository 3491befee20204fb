"""Which back end runs where, and which GPUs there are, on machines as nvidia-smi would tell of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.backends import BACKENDS, NAMES, BackendChoice, Machine, choose, sharers
from pytest_fxbucket.ranks import device, machine
from pytest_fxbucket.ranks.machine import gpus, has_mps, loaded_nccl, nvidia_smi, spread, this_machine, use_device, version_of

WITH_A_SLICE = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-91f1b8a5-02a5-3f4c-8a9f-6d1c6e2d9f10)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-42ab3c11-0a7e-4f30-b1f5-2f0f5e0c9d77)
"""
FIRST = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
SECOND = "GPU-91f1b8a5-02a5-3f4c-8a9f-6d1c6e2d9f10"
THIRD = "GPU-42ab3c11-0a7e-4f30-b1f5-2f0f5e0c9d77"
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
            ("auto", 2, machine_with(1, None), BackendChoice("gloo", "nccl needs a torch that was built with NCCL")),
            (
                "auto",
                2,
                machine_with(1, None, has_cuda=False),
                BackendChoice("gloo", "nccl needs a torch that was built with CUDA"),
            ),
            ("auto", 2, machine_with(0, None, has_cuda=False), BackendChoice("gloo", "nccl needs 2 GPUs, this machine has 0")),
            ("auto", 2, machine_with(2, has_cuda=False), BackendChoice("gloo", "nccl needs a torch that was built with CUDA")),
            ("nccl", 1, machine_with(1, OLD), BackendChoice("nccl", ranks_on_gpu=1)),
            ("nccl", 4, machine_with(4, OLD), BackendChoice("nccl", ranks_on_gpu=1)),
            ("nccl", 4, machine_with(0), BackendChoice(None, "nccl needs 1 GPU, this machine has 0")),
            ("nccl", 4, machine_with(0, OLD), BackendChoice(None, "nccl needs 4 GPUs, this machine has 0")),
            ("nccl", 17, machine_with(1), BackendChoice(None, "nccl needs 2 GPUs, this machine has 1 for 16 ranks each")),
            (
                "nccl",
                17,
                machine_with(1, OLD),
                BackendChoice(
                    None,
                    "nccl needs 17 GPUs, this machine has 1; NCCL 2.29.7 gives each rank its own, and from 2.30 on 16 ranks "
                    "share one at most",
                ),
            ),
            ("nccl", 2, machine_with(2, None), BackendChoice(None, "nccl needs a torch that was built with NCCL")),
            ("gloo:cuda", 4, machine_with(1), BackendChoice("gloo:cuda", ranks_on_gpu=4)),
            (
                "nccl",
                4,
                machine_with(4, (2, 23, 4)),
                BackendChoice(None, "nccl needs NCCL 2.24 or newer, the one that is loaded is 2.23.4"),
            ),
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
        for nccl in (OLD, NEW):  # which no other NCCL would change
            one_each = choose("nccl", 4, machine_with(1, nccl), 1).lacking
            assert one_each == "nccl needs 4 GPUs, this machine has 1 for 1 rank each ([run] ranks_per_gpu)"

    @pytest.mark.parametrize("asked", ["nccl", "gloo:cuda"])
    def test_a_gpu_that_takes_one_process_is_not_shared(self, asked: str) -> None:
        both = replace(machine_with(2), exclusive=("GPU-1",))
        assert choose(asked, 2, both) == BackendChoice(asked, ranks_on_gpu=1)
        assert choose(asked, 3, both).lacking == (
            f"{asked} needs 3 GPUs, this machine has 2; GPU-1 takes one process at a time (nvidia-smi --compute-mode=DEFAULT "
            "lets ranks share it)"
        )

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

    def test_nccls_ranks_lease_all_of_a_gpu_or_the_part_that_their_plan_says_and_others_a_place_each(self) -> None:
        places = BACKENDS["nccl"].places_to_lease
        assert [places(ranks) for ranks in (1, 2, 3, 8, 16)] == [16] * 5
        assert [places(ranks, 8) for ranks in (1, 2, 3, 8)] == [2, 4, 6, 16]
        assert [places(ranks, 3) for ranks in (1, 2, 3)] == [6, 11, 16]
        assert [BACKENDS["gloo:cuda"].places_to_lease(ranks, 8) for ranks in (1, 3, 8)] == [1, 3, 8]
        assert BACKENDS["gloo:cuda"].places_to_lease(20) == 16

    def test_a_gpu_is_divided_among_all_who_may_be_there(self) -> None:
        assert (sharers(2), sharers(2, 8), sharers(1, 8), sharers(1)) == (2, 8, 8, 1)

    @pytest.mark.parametrize(("number", "version"), [(23007, (2, 30, 7)), (21805, (2, 18, 5)), (2804, (2, 8, 4))])
    def test_nccl_gives_its_version_as_a_number(self, number: int, version: tuple[int, ...]) -> None:
        assert version_of(number) == version

    def test_ranks_get_the_leased_gpus_in_turn(self) -> None:
        assert spread(("a", "b"), 5) == ("a", "b", "a", "b", "a")
        assert spread((), 2) == ("", "")


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Put an nvidia-smi of ours first on the path; gives the file in which it notes what it was asked."""

    def write(*, listed: str, modes: str = "", status: int = 0) -> Path:
        (tmp_path / "listed").write_text(listed)
        (tmp_path / "modes").write_text(modes)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncd {tmp_path}; echo "$@" >>asked\ncase $1 in -L) cat listed;; *) cat modes;; esac\nexit {status}\n'
        )
        program.chmod(0o755)
        return tmp_path / "asked"

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    nvidia_smi.cache_clear()
    yield write
    nvidia_smi.cache_clear()


# torch itself, which says no more here than whether it has NCCL, is not imported.
LOADED = """
import sys, types
dist = types.SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)
sys.modules |= {"torch": types.SimpleNamespace(distributed=dist), "torch.distributed": dist}
from pytest_fxbucket.ranks.machine import loaded_nccl
print(loaded_nccl())
"""


@pytest.fixture
def without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share a GPU where torch has a newer NCCL, and then need fewer."""
    monkeypatch.setattr(machine, "loaded_nccl", lambda: None)


class TestGpus:
    @pytest.mark.parametrize(
        ("visible", "found"),
        [
            (None, (FIRST, THIRD)),  # the second is in MIG mode
            ("0", (FIRST,)),
            ("2,0", (THIRD, FIRST)),
            (" 2 ", (THIRD,)),
            ("1,0", (FIRST,)),
            ("GPU-91", ()),
            ("GPU-42", (THIRD,)),
            (f"{THIRD},{FIRST}", (THIRD, FIRST)),
            ("MIG-c6d4f1ef", (SLICE,)),
            ("", ()),
            ("-1", ()),
            ("0,7,2", (FIRST,)),
            ("GPU-", ()),  # more than one begins so
            ("0,0", ()),
        ],
    )
    def test_cuda_visible_devices_is_read_as_cuda_reads_it(
        self, visible: str | None, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "nvidia_smi", lambda: WITH_A_SLICE)
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert machine.gpus(environ) == found

    def test_a_machine_without_nvidia_smi_has_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        nvidia_smi.cache_clear()
        assert gpus({}) == ()
        nvidia_smi.cache_clear()

    @pytest.mark.parametrize(("status", "found"), [(0, (FIRST, THIRD)), (9, ())])
    def test_the_program_is_asked_once_and_believed_if_it_succeeds(
        self, nvidia: Callable[..., Path], status: int, found: tuple[str, ...]
    ) -> None:
        asked = nvidia(listed=WITH_A_SLICE, status=status)
        assert (gpus({}), gpus({})) == (found, found)
        assert asked.read_text() == "-L\n"

    @pytest.mark.parametrize("visible", ["", "-1", "7"])
    @pytest.mark.usefixtures("without_nccl")
    def test_a_variable_that_leaves_no_gpu_is_named(self, nvidia: Callable[..., Path], visible: str) -> None:
        nvidia(listed=WITH_A_SLICE)
        assert choose("auto", 2, this_machine({"CUDA_VISIBLE_DEVICES": visible})).lacking == (
            f'nccl needs 2 GPUs, this machine has 0; CUDA_VISIBLE_DEVICES="{visible}" leaves none of those that are there'
        )

    @pytest.mark.parametrize("visible", [SECOND, "1"])
    @pytest.mark.usefixtures("without_nccl")
    def test_a_gpu_in_mig_mode_is_left_out_until_a_slice_is_named(self, nvidia: Callable[..., Path], visible: str) -> None:
        nvidia(listed=WITH_A_SLICE)
        assert choose("auto", 2, this_machine({"CUDA_VISIBLE_DEVICES": visible})).lacking == (
            f"nccl needs 2 GPUs, this machine has 0; {SECOND} is in MIG mode: name one of its slices in CUDA_VISIBLE_DEVICES"
        )
        assert this_machine({"CUDA_VISIBLE_DEVICES": SLICE}).left_out == ""

    @pytest.mark.parametrize(
        ("modes", "has_service", "exclusive"),
        [
            (f"{FIRST}, Default\n{THIRD}, Exclusive_Process\n", False, (THIRD,)),
            (f"{FIRST}, Default\n{THIRD}, Exclusive_Process\n", True, ()),  # the one process is the service
            (f"{FIRST}, Default\n{THIRD}, Default\n", False, ()),
            ("not supported\n", False, ()),
        ],
    )
    def test_gpus_that_take_one_process_are_told(
        self,
        nvidia: Callable[..., Path],
        monkeypatch: pytest.MonkeyPatch,
        modes: str,
        has_service: bool,
        exclusive: tuple[str, ...],
    ) -> None:
        nvidia(listed=WITH_A_SLICE, modes=modes)
        monkeypatch.setattr(machine, "has_mps", lambda: has_service)
        assert this_machine({}).exclusive == exclusive

    def test_the_machine_says_what_torch_was_built_with(self) -> None:
        import torch

        assert this_machine({"CUDA_VISIBLE_DEVICES": ""}) == Machine((), torch.version.cuda is not None, loaded_nccl())

    @pytest.mark.skipif(shutil.which("cc") is None, reason="makes a library of its own, and there is no C compiler here")
    def test_of_nccl_the_library_that_is_loaded_counts(self, tmp_path: Path) -> None:
        """One that says 2.31.4, loaded as LD_PRELOAD would."""
        source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
        source.write_text("int ncclGetVersion(int *version) { *version = 23104; return 0; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        done = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, check=True)
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
