"""The GPUs of this machine, leases of them for one run at a time, and where a rank's own tensors belong."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import re
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pytest_fxbucket.backends import PLACES, Machine
from pytest_fxbucket.errors import RankError

_ANSWER_LIMIT_S = 30.0
_NCCL = "libnccl.so.2"
_UUID = re.compile(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)")
_device = "cpu"


def spread(leased: Sequence[str], world: int) -> tuple[str, ...]:
    """The GPU of each rank, in turn; a rank has none ("") where none are leased."""
    return tuple(leased[rank % len(leased)] if leased else "" for rank in range(world))


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine as it is. Imports torch, and leaves CUDA alone."""
    import torch

    found = gpus(environ)
    return Machine(found, torch.version.cuda is not None, loaded_nccl(), _exclusive(found), _left_out(found, environ))


def loaded_nccl() -> tuple[int, ...] | None:
    """Version of the NCCL library that torch calls in this process; None if it calls none. Imports torch.

    torch itself knows only what it was compiled with. Another library may have been loaded first, by LD_PRELOAD.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL(_NCCL, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # the one that is there, and no other
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # linked into torch
        import torch

        return tuple(torch.cuda.nccl.version()[:3])
    return version_of(number.value)


def version_of(number: int) -> tuple[int, int, int]:
    """The version that NCCL gives as one number: 23007 is 2.30.7; before 2.9 the minor one has a digit less."""
    major = 10_000 if number >= 10_000 else 1_000
    return number // major, number % major // 100, number % 100


@functools.cache
def has_mps() -> bool:
    """Whether NVIDIA's Multi-Process Service runs, under which kernels of several processes run at once; never started here."""
    return _answer("nvidia-cuda-mps-control", said="get_server_list\n") is not None


def gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; without it all, in nvidia-smi's (PCI) order.

    A GPU in MIG mode is left out; a slice of it counts as a GPU if CUDA_VISIBLE_DEVICES names the slice.

    This neither imports torch nor starts CUDA, after which no process could be forked.
    """
    there = _UUID.findall(nvidia_smi())
    parted = _parted(there)
    return tuple(uuid for uuid in _visible(there, environ.get("CUDA_VISIBLE_DEVICES")) if uuid not in parted)


def _parted(there: Sequence[str]) -> list[str]:
    """GPUs of ``there`` in MIG mode, which have slices listed below them: CUDA uses one slice of such a GPU, or nothing."""
    return [gpu for gpu, below in pairwise(there) if gpu.startswith("GPU-") and below.startswith("MIG-")]


def _left_out(found: Sequence[str], environ: Mapping[str, str]) -> str:
    """Why GPUs of this machine cannot be used, as a clause: MIG mode, or CUDA_VISIBLE_DEVICES leaves none; "" otherwise."""
    there, said = _UUID.findall(nvidia_smi()), environ.get("CUDA_VISIBLE_DEVICES")
    if parted := set(_parted(there)).intersection(_visible(there, said)):
        return f"{min(parted)} is in MIG mode: name one of its slices in CUDA_VISIBLE_DEVICES"
    return f'CUDA_VISIBLE_DEVICES="{said}" leaves none of those that are there' if there and not found else ""


def _exclusive(found: Sequence[str]) -> tuple[str, ...]:
    """GPUs of ``found`` whose compute mode admits one process; none if that process is the Multi-Process Service."""
    said = nvidia_smi("--query-gpu=uuid,compute_mode", "--format=csv,noheader") if found else ""
    modes = dict(line.split(", ") for line in said.splitlines() if line.count(", ") == 1)
    exclusive = tuple(gpu for gpu in found if modes.get(gpu, "").startswith("Exclusive"))
    return () if exclusive and has_mps() else exclusive


@functools.cache
def nvidia_smi(*asked: str) -> str:
    """What nvidia-smi prints for the arguments ``asked``, by default -L; "" where there is no such program, or no driver."""
    return _answer("nvidia-smi", *(asked or ["-L"])) or ""


def _answer(*command: str, said: str = "") -> str | None:
    """What ``command`` prints, with ``said`` as its input; None where there is no such program, or it fails."""
    try:
        done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=_ANSWER_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def device() -> str:
    """Where this rank's tensors belong: "cpu", or "cuda:0", which is the rank's own GPU, the only one it sees."""
    return _device


def use_device(name: str) -> None:
    """Set what :func:`device` returns; called once in a rank's process."""
    global _device
    _device = name


def _visible(there: Sequence[str], said: str | None) -> tuple[str, ...]:
    """Those of ``there`` that CUDA_VISIBLE_DEVICES says, each by its index or the beginning of its UUID."""
    whole = [uuid for uuid in there if uuid.startswith("GPU-")]
    if said is None:
        return tuple(whole)
    found: list[str] = []
    for word in (part.strip() for part in said.split(",")):
        index = int(word) if word.isdigit() else len(whole)
        matches = whole[index : index + 1] or [uuid for uuid in there if word and uuid.startswith(word)]
        if len(matches) != 1:
            break  # as CUDA, which uses none from the first that it does not know
        found += matches
    return tuple(found) if len(set(found)) == len(found) else ()


# Places on GPUs, leased by file locks, which the kernel gives back when their holder ends, however it ends.
#
# Each GPU has PLACES empty files ``gpu-UUID-NN``, one for each rank that could share it. The holder keeps locks on as many as
# it leases, on all if it wants the GPU for itself. Who waits keeps ``queue-UUID`` of every GPU that it could use, so that all
# stand in one line and a run that wants many is not overtaken by runs that want few. Files stay, as removing one that is
# locked by name would let two runs lock two files of it.


# Not from the environment (XDG_RUNTIME_DIR, TMPDIR): two runs that differ there must still meet.
FOLDER = Path(f"/tmp/fxbucket-{os.getuid()}")
_POLL_S = 0.05


class Lease:
    """GPUs that are ours until ``release``, or the end of this process."""

    def __init__(self, gpus: tuple[str, ...], locks: Sequence[int], folder: Path) -> None:
        self.gpus, self._locks, self._folder = gpus, list(locks), folder

    def is_wanted(self) -> bool:
        """Whether somebody waits for one of them: a pool that is idle should give its own back then."""
        for gpu in self.gpus if self._locks else ():
            # A shared lock, so that two holders who look at once do not take each other for one who waits.
            queue = _locked(self._folder / f"queue-{gpu}", fcntl.LOCK_SH)
            if queue is None:
                return True
            _unlock(queue)
        return False

    def release(self) -> None:
        """Give all back; idempotent."""
        _unlock_all(self._locks)


def take(
    count: int,
    gpus: Sequence[str],
    *,
    places: int = PLACES,
    limit_s: float,
    say: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
) -> Lease:
    """Lease ``places`` on each of ``count`` of ``gpus``, all at once or none: on the first that have them, in the order given.

    All places: nobody else is on that GPU. Waits up to ``limit_s`` seconds, telling ``say`` what for
    whenever that changes. Who holds a lease must not wait for another. Raises RankError when the time is over, or when
    ``folder`` (left out: FOLDER) cannot be used.
    """
    if not 0 < count <= len(gpus):
        raise RankError(f"a lease of {count} of {len(gpus)} GPUs; expected 1 to {len(gpus)}")
    folder = private_folder(FOLDER if folder is None else folder)
    waiting = _Waiting(count, len(gpus), limit_s, say, folder)
    with contextlib.ExitStack() as line:
        # All in one order, so that two who wait for some of the same GPUs cannot each stand before the other.
        for gpu in sorted(gpus):
            while (queue := _locked(folder / f"queue-{gpu}", fcntl.LOCK_EX)) is None:
                waiting.go_on("others wait before us")
            line.callback(_unlock, queue)
        while True:
            # All or nothing: locks that are too few, or more than needed, are given back before the next try.
            free = {gpu: locks for gpu in gpus if (locks := _some_places(folder, gpu, places))}
            kept = tuple(free)[:count] if len(free) >= count else ()
            for gpu in free.keys() - kept:
                _unlock_all(free[gpu])
            if kept:
                return Lease(kept, [lock for gpu in kept for lock in free[gpu]], folder)
            waiting.go_on(f"{len(free)} {'is' if len(free) == 1 else 'are'} free")


class _Waiting:
    """Says what it waits for, sleeps a little, and raises when the time is over."""

    def __init__(self, count: int, there: int, limit_s: float, say: Callable[[str], None], folder: Path) -> None:
        self._what, self._there, self._limit_s = f"{count} GPU{'s' * (count > 1)}", there, limit_s
        self._say, self._folder, self._said = say, folder, ""
        self._deadline = time.monotonic() + limit_s

    def go_on(self, why: str) -> None:
        if time.monotonic() >= self._deadline:
            raise RankError(
                f"{self._what} of {self._there} could not be leased within {self._limit_s:g} s ({why}): other runs hold locks "
                f"in {self._folder}; let them end, or name other GPUs in CUDA_VISIBLE_DEVICES"
            )
        if why != self._said:
            self._say(f"waiting for {self._what}, {why}")
            self._said = why
        time.sleep(_POLL_S)


def private_folder(path: Path) -> Path:
    """``path``, made if it is not there. Raises RankError unless it is this user's and closed to all others."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise RankError(f"there is no room for the locks of GPUs at {path} ({error.strerror})") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RankError(f"{path}, where the locks of GPUs lie, must be a folder of yours with mode 0700; remove or chmod it")
    return path


def _some_places(folder: Path, gpu: str, count: int) -> list[int]:
    """Locks of ``count`` places on ``gpu``, or none."""
    held: list[int] = []
    for number in range(PLACES):
        lock = _locked(folder / f"gpu-{gpu}-{number:02}", fcntl.LOCK_EX)
        if lock is not None:
            held.append(lock)
        if len(held) == count:
            return held
    _unlock_all(held)
    return []


def _unlock_all(locks: list[int]) -> None:
    while locks:
        _unlock(locks.pop())


def _locked(path: Path, mode: int) -> int | None:
    """A descriptor that holds the lock of ``path``, or None if others hold it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _unlock(fd: int) -> None:
    # Not by closing alone: a process that was forked meanwhile has a copy of the descriptor.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
