"""Stored runs are written whole, each with a number of its own, never over another, even if runs end at once or are killed.

pytest-benchmark takes the next number from a listing and then writes into the file of that name: two runs may take the same
one, and one that is killed leaves half a file. Here a file has its name only once it is whole and on disk, by a link, which
never replaces; a lock keeps two runs from listing at once where the file system has locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_fxbucket.bench.stored_files import number_of
from pytest_fxbucket.golden.disk import settle

_PREFIX, _SUFFIX = ".fxbucket-", ".tmp"


def save_new(folder: Path, name: str, data: bytes, beside: Iterable[Path] = ()) -> Path:
    """Write `data` as `NNNN_<name>.json` in `folder`, made if need be, NNNN being one more than any there and in `beside`.

    Returns its path. Raises OSError, and then nothing is left; what was there before is never touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as is_alone:
        if is_alone:
            _sweep(folder)
        with _written(folder, data) as temporary:
            number = 1 + max((number_of(file) for each in (folder, *beside) for file in each.glob("*_*.json")), default=0)
            while (target := _linked(temporary, folder, f"{number:04}_{name}.json")) is None:
                number += 1
        settle(folder)
    return target


def replace_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`: until it is whole and on disk, what was there stays. Raises OSError, and then it is there too.

    A link is followed. What is no file of a disk, such as a device or a pipe, cannot be replaced: data go into it.
    """
    if _is_special(path):
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    with _written(path.parent, data) as temporary:
        os.replace(temporary, path)
    settle(path.parent)


def never_replaced(path: Path, storage: Path | None, compared: str | None) -> str:
    """What it is that would be lost with `path`: a run below `storage`, or the file `compared`; "" if it may be replaced."""
    target = os.path.realpath(path)
    if storage is not None and number_of(Path(target)) and Path(target).is_relative_to(os.path.realpath(storage)):
        return "a stored run" if os.path.lexists(target) else ""
    is_compared = compared is not None and os.path.isabs(compared) and os.path.realpath(compared) == target
    return "the run to compare with" if is_compared else ""


def _is_special(path: Path) -> bool:
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False
    places = (os.path.abspath(path), os.path.realpath(path))  # /dev/stdout may be a file that is open
    return not is_file or any(place.startswith(("/dev/", "/proc/")) for place in places)


@contextlib.contextmanager
def _written(folder: Path, data: bytes) -> Iterator[Path]:
    """A file with `data` that has reached the disk; its name is taken away in the end."""
    path = folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _linked(temporary: Path, folder: Path, name: str) -> Path | None:
    """Give the file that name too; None if it is taken."""
    target = folder / name
    try:
        os.link(temporary, target)
    except FileExistsError:
        return None
    except OSError:  # a file system without links; the lock keeps others from taking the name meanwhile
        if os.path.lexists(target):
            return None
        os.rename(temporary, target)
    return target


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Wait until no other run saves in `folder`; False where the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove what killed runs left; under the lock, where none of it is in use."""
    for path in folder.glob(f"{_PREFIX}{'[0-9a-f]' * 16}{_SUFFIX}"):
        with contextlib.suppress(OSError):
            path.unlink()
