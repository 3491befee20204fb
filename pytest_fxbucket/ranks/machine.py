"""The GPUs of this machine, leases of them for one run at a time, and where a rank's own tensors belong."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytest_fxbucket.backends import Machine
from pytest_fxbucket.errors import RankError

_SMI_LIMIT_S = 30.0
_UUID = re.compile(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)")
_device = "cpu"


def spread(leased: Sequence[str], world: int) -> tuple[str, ...]:
    """The GPU of each rank, in turn; a rank has none ("") where none are leased."""
    return tuple(leased[rank % len(leased)] if leased else "" for rank in range(world))


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine as it is. Imports torch, and leaves CUDA alone."""
    import torch
    import torch.distributed as dist

    return Machine(gpus(environ), torch.version.cuda is not None, dist.is_available() and dist.is_nccl_available())


def gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; without it all, in nvidia-smi's (PCI) order.

    It neither imports torch nor starts CUDA, after which no process could be forked.
    """
    return _visible(_UUID.findall(nvidia_smi()), environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def nvidia_smi() -> str:
    """What ``nvidia-smi -L`` prints; "" where there is no such program, or no driver."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def device() -> str:
    """Where this rank's tensors belong: "cpu", or "cuda:0", which is the rank's own GPU, the only one it sees."""
    return _device


def use_device(name: str) -> None:
    """Say so, once in a rank's process."""
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


# GPUs for one run at a time: file locks, which the kernel gives back when their holder ends, however it ends.
#
# Each GPU has two empty files. The holder keeps a lock on ``gpu-UUID``: alone, or shared with others that share the GPU. Who
# waits keeps ``queue-UUID`` of every GPU that it could use, so that all stand in one line and a run that wants many is not
# overtaken by runs that want few. Files stay, as removing one that is locked by name would let two runs lock two files of it.


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
        while self._locks:
            _unlock(self._locks.pop())


def take(
    count: int,
    gpus: Sequence[str],
    *,
    shared: bool = False,
    limit_s: float,
    say: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
) -> Lease:
    """Lease ``count`` of ``gpus``, all at once or none: the first that are free, in the order given.

    ``shared``: with others who share, never with one who does not. Waits up to ``limit_s`` seconds, telling ``say`` what for
    whenever that changes. Who holds a lease must not wait for another. Raises RankError when the time is over, or when
    ``folder`` (left out: FOLDER) cannot be used.
    """
    if not 0 < count <= len(gpus):
        raise RankError(f"a lease of {count} of {len(gpus)} GPUs; expected 1 to {len(gpus)}")
    folder = private_folder(FOLDER if folder is None else folder)
    waiting = _Waiting(count, len(gpus), limit_s, say, folder)
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with contextlib.ExitStack() as line:
        # All in one order, so that two who wait for some of the same GPUs cannot each stand before the other.
        for gpu in sorted(gpus):
            while (queue := _locked(folder / f"queue-{gpu}", fcntl.LOCK_EX)) is None:
                waiting.go_on("others wait before us")
            line.callback(_unlock, queue)
        while True:
            free = {gpu: lock for gpu in gpus if (lock := _locked(folder / f"gpu-{gpu}", mode)) is not None}
            kept = tuple(free)[:count] if len(free) >= count else ()
            for gpu in free.keys() - kept:
                _unlock(free[gpu])
            if kept:
                return Lease(kept, [free[gpu] for gpu in kept], folder)
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
