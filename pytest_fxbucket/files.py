"""Files written whole or not at all, what they held when the run began, and what a killed run left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX, _SUFFIX = ".fxbucket-", ".tmp"
_TEMPORARY = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}" + re.escape(_SUFFIX))


def write_whole(path: Path, text: str, check: Callable[[], None] = lambda: None) -> bool:
    """Write ``text`` (UTF-8) to ``path`` through a temporary file beside it; False if those bytes are there already.

    The file keeps its mode; a new one has what the umask lets be. ``check`` is called when nothing but the name is left to do:
    what it raises leaves the file as it is. Raises OSError, and then too the old file is there, and no other.
    """
    import tempfile

    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_PREFIX, suffix=_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            # mkstemp lets nobody but the owner read the file, whatever the umask says.
            os.fchmod(handle, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask())
            # The bytes are on the disk before the name leads to them, so that a crash of the machine leaves no half file.
            os.fsync(handle)
        check()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return True


def settle(folder: Path) -> None:
    """Have the names in ``folder`` outlive a crash of the machine, where its file system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep other accepting runs from writing below the folder ``root`` in the block; a run that dies lets go of it."""
    import fcntl

    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sweep(files: Iterable[Path]) -> None:
    """Remove those of ``files`` that killed runs left; under ``locked``, where none is in use."""
    for path in files:
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def files_below(root: Path) -> list[Path]:
    """Return all that is no folder below ``root``, sorted; links are given and not followed, but for ``root`` itself."""
    # Names are taken as they are listed: in a folder that may be read and not entered, nothing more can be said of them.
    return sorted(
        Path(folder, name)
        for folder, folders, names in os.walk(root)
        for name in (*names, *(one for one in folders if os.path.islink(os.path.join(folder, one))))
    )


def plans_below(root: Path) -> list[Path]:
    """Return all ``*.toml`` below ``root``, sorted; linked folders are looked into, too, each once, by its own name first."""
    found: list[Path] = []
    seen: set[str] = set()
    roots = [str(root)]
    while roots:
        links: list[str] = []
        for folder, folders, names in (one for start in roots for one in os.walk(start)):
            real = os.path.realpath(folder)
            if real in seen:  # two links lead to it, or one that leads back
                folders.clear()
                continue
            seen.add(real)
            found += [Path(folder, name) for name in names if name.endswith(".toml")]
            below = [os.path.join(folder, name) for name in sorted(folders)]
            links += [path for path in below if os.path.islink(path)]
        roots = links
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What each file below ``root`` held when the run began, as digests."""

    root: Path
    digests: Mapping[Path, str] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> Snapshot:
        """Look at all files below ``root``, which need not be there."""
        return cls(root, {path: _state(path) for path in files_below(root)})

    def change(self, path: Path) -> str | None:
        """Say what became of ``path`` since then, as ``was changed``; None if it is as it was."""
        then, now = self.digests.get(path, ""), _state(path)
        if then == now:
            return None
        if not now:
            return "was removed"
        return "was changed" if then else "was written by somebody else"


def digest(data: bytes) -> str:
    """Return what tells one content of a file from another: its SHA-256, in hexadecimal."""
    import hashlib  # 4 ms that pytest's start-up need not pay

    return hashlib.sha256(data).hexdigest()


def _state(path: Path) -> str:
    """Return what tells one state of the file ``path`` from another; empty if there is no file."""
    try:
        if path.is_symlink():
            return f"link to {os.readlink(path)}"
        return digest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""
    except OSError as error:
        return str(error.strerror or error)


def obstacle(path: Path, root: Path) -> str | None:
    """Say why ``path`` below ``root`` must be left as it is, in a sentence: a link, in the way, read-only; or None."""
    for one in (path, *path.parents):
        if one == root:
            break
        if one.is_symlink():
            return f"{one} is a symbolic link, and goldens are written to no other place; put a file or folder of its own there"
    if reason := in_the_way(path, root):
        return reason
    if path.is_file() and not path.stat().st_mode & 0o222:
        return f"{path} is read-only; make it writable first: chmod u+w {path}"
    return None


def in_the_way(path: Path, root: Path) -> str | None:
    """Say what stands where the file ``path``, or a folder from ``root`` down to it, belongs, in a sentence; or None."""
    if os.path.isdir(path):
        return f"{path} is a folder, where a golden's file was expected; move it away"
    for folder in path.parents:
        if os.path.isfile(folder):
            return f"{folder} is a file, where a folder of goldens was expected; move it away"
        if folder == root:
            break
    return None


def not_written(path: Path, shown: str, error: OSError) -> str:
    """Say that ``path``, called ``shown``, was not written because of ``error``, and what to do where there is something."""
    way = ""
    if isinstance(error, PermissionError):
        way = f"; make its folder writable first: chmod u+wx {shlex.quote(str(path.parent))}"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        way = "; make room and run again"
    return f"{shown} could not be written: {error.strerror or error}{way}"


def _umask() -> int:
    # It can be read only by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
