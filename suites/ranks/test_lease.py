"""Leases of GPUs among real processes, which are killed, wait, and stand in line."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_fxbucket.backends import PLACES
from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.machine import Lease, private_folder, take

HOLDER = Path(__file__).with_name("lease_holder.py")
GPUS = ("GPU-c", "GPU-a", "GPU-b", "GPU-d")


class Other:
    """Another run: what it says comes line by line."""

    def __init__(self, folder: Path, count: int, gpus: tuple[str, ...], places: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HOLDER), str(folder), str(count), str(places), *gpus],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def give_back(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.says() == "gave back"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def other(folder: Path) -> Iterator[Callable[..., Other]]:
    started: list[Other] = []

    def start(count: int, gpus: tuple[str, ...] = GPUS, places: int = PLACES) -> Other:
        started.append(Other(folder, count, gpus, places))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


def try_to_take(folder: Path, count: int, gpus: tuple[str, ...] = GPUS, *, places: int = PLACES) -> tuple[str, ...]:
    """What could be leased at once; given back at once."""
    try:
        lease = take(count, gpus, places=places, limit_s=0, folder=folder)
    except RankError:
        return ()
    lease.release()
    return lease.gpus


class TestExclusive:
    def test_no_gpu_is_leased_twice_and_all_or_none_are_taken(self, folder: Path, other: Callable[..., Other]) -> None:
        assert other(2).says() == "has GPU-c GPU-a"
        assert try_to_take(folder, 2) == ("GPU-b", "GPU-d")
        assert other(1).says() == "has GPU-b"
        assert try_to_take(folder, 2) == ()
        assert try_to_take(folder, 1) == ("GPU-d",)

    def test_the_kernel_gives_back_what_a_killed_run_held(self, folder: Path, other: Callable[..., Other]) -> None:
        holder = other(4)
        assert holder.says().startswith("has ")
        assert try_to_take(folder, 1) == ()
        holder.process.kill()
        holder.process.wait()
        assert len(try_to_take(folder, 4)) == 4

    def test_a_child_of_the_holder_keeps_nothing(self, folder: Path) -> None:
        lease = take(1, GPUS, limit_s=0, folder=folder)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:  # has all descriptors of the lease until its pipe closes
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
        os.close(ours)
        lease.release()
        try:
            assert len(try_to_take(folder, 4)) == 4
        finally:
            os.close(theirs)
            os.waitpid(child, 0)

    def test_runs_share_a_gpu_while_it_has_places(self, folder: Path, other: Callable[..., Other]) -> None:
        assert other(1, ("GPU-a",), 10).says() == "has GPU-a"
        assert try_to_take(folder, 1, ("GPU-a",), places=6) == ("GPU-a",)
        assert try_to_take(folder, 1, ("GPU-a",), places=7) == ()
        assert try_to_take(folder, 1, ("GPU-a",)) == ()
        lease = take(1, ("GPU-b",), limit_s=0, folder=folder)
        assert try_to_take(folder, 1, ("GPU-b",), places=1) == ()
        lease.release()


class TestWaiting:
    def test_who_waits_says_so_and_goes_on_when_enough_are_free(self, folder: Path, other: Callable[..., Other]) -> None:
        first, second = take(2, GPUS, limit_s=0, folder=folder), take(1, GPUS, limit_s=0, folder=folder)
        waiter = other(4)
        assert waiter.says() == "waiting for 4 GPUs, 1 is free"
        first.release()
        assert waiter.says() == "waiting for 4 GPUs, 3 are free"
        second.release()
        assert waiter.says() == "has GPU-c GPU-a GPU-b GPU-d"

    def test_who_came_later_does_not_overtake(self, folder: Path, other: Callable[..., Other]) -> None:
        lease = take(1, GPUS, limit_s=0, folder=folder)
        many = other(4)
        assert many.says() == "waiting for 4 GPUs, 3 are free"
        few = other(1)
        assert few.says() == "waiting for 1 GPU, others wait before us"
        lease.release()
        assert many.says().startswith("has ")
        assert few.says() == "waiting for 1 GPU, 0 are free"
        many.give_back()
        assert few.says() == "has GPU-c"

    def test_runs_that_see_other_gpus_do_not_stand_in_line(self, folder: Path, other: Callable[..., Other]) -> None:
        lease = take(1, ("GPU-a", "GPU-b"), limit_s=0, folder=folder)
        assert other(2, ("GPU-b", "GPU-a")).says() == "waiting for 2 GPUs, 1 is free"
        assert try_to_take(folder, 2, ("GPU-c", "GPU-d")) == ("GPU-c", "GPU-d")
        lease.release()

    def test_the_holder_sees_that_it_is_waited_for(self, folder: Path, other: Callable[..., Other]) -> None:
        lease, spare = take(1, ("GPU-a",), limit_s=0, folder=folder), take(1, ("GPU-b",), limit_s=0, folder=folder)
        assert not lease.is_wanted()
        waiter = other(1, ("GPU-a",))
        assert waiter.says().startswith("waiting")
        assert lease.is_wanted()
        assert not spare.is_wanted()
        lease.release()
        assert waiter.says() == "has GPU-a"
        assert not lease.is_wanted()
        spare.release()

    def test_all_stand_in_line_in_one_order_so_that_no_two_block_each_other(
        self, folder: Path, other: Callable[..., Other]
    ) -> None:
        queues = [private_folder(folder) / f"queue-{gpu}" for gpu in ("GPU-a", "GPU-b")]
        with queues[0].open("w") as first, queues[1].open("w") as second:
            fcntl.flock(first, fcntl.LOCK_EX)
            assert other(2, ("GPU-b", "GPU-a")).says() == "waiting for 2 GPUs, others wait before us"
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_the_time_ends_with_a_sentence(self, folder: Path) -> None:
        lease = take(3, GPUS, limit_s=0, folder=folder)
        with pytest.raises(RankError) as caught:
            take(2, GPUS, limit_s=0.2, folder=folder)
        assert str(caught.value) == (
            f"2 GPUs of 4 could not be leased within 0.2 s (1 is free): other runs hold locks in {folder}; let them end, or "
            "name other GPUs in CUDA_VISIBLE_DEVICES"
        )
        lease.release()

    def test_more_than_there_are_is_an_error_at_once(self, folder: Path) -> None:
        with pytest.raises(RankError, match="a lease of 5 of 4 GPUs"):
            take(5, GPUS, limit_s=60, folder=folder)


class TestFolder:
    def test_nobody_else_can_read_it(self, folder: Path) -> None:
        old = os.umask(0)
        try:
            take(1, GPUS, limit_s=0, folder=folder).release()
        finally:
            os.umask(old)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}

    @pytest.mark.parametrize("kind", ["open", "link", "file"])
    def test_one_that_others_can_reach_is_refused(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "place"
        if kind == "open":
            path.mkdir()
            path.chmod(0o755)
        elif kind == "link":
            path.symlink_to(private_folder(tmp_path / "elsewhere"))
        else:
            path.touch(0o600)
        with pytest.raises(RankError, match="must be a folder of yours with mode 0700"):
            take(1, GPUS, limit_s=0, folder=path)

    def test_release_twice_is_harmless(self, folder: Path) -> None:
        lease: Lease = take(1, GPUS, limit_s=0, folder=folder)
        lease.release()
        again = take(1, ("GPU-c",), limit_s=0, folder=folder)
        lease.release()
        assert try_to_take(folder, 1, ("GPU-c",)) == ()
        again.release()
