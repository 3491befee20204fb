"""Accepting goldens: texts are queued while items run and written once, at the end, by one process.

A worker of pytest-xdist hands its texts to the controller as plain dicts (``{"path": ..., "text": ...}``) on the
report of the item that gave them, so a worker that dies loses nothing that was reported, and no two processes write.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MODES = ("new", "changed", "all")


def accepts(mode: str | None, path: Path) -> bool:
    """Say whether accept mode `mode` lets `path` be written: new only if missing, changed only if there, all both."""
    return mode == "all" or mode == ("changed" if path.exists() else "new")


@dataclass(frozen=True, slots=True)
class Written:
    """What a flush did: goldens really changed on disk, and a sentence for each that could not be written."""

    paths: tuple[Path, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class AcceptQueue:
    """Golden texts that wait for the end of the run."""

    pending: dict[Path, str] = field(default_factory=dict)
    clashing: set[Path] = field(default_factory=set)

    def add(self, path: Path, text: str) -> None:
        """Queue the whole file `text` that GoldenStore.render gave for `path`; GoldenError if it is damaged."""
        from pytest_fxbucket.golden.store import parse

        parse(text, str(path))
        if self.pending.setdefault(path, text) != text:
            self.clashing.add(path)

    def extend(self, entries: Iterable[Mapping[str, str]]) -> None:
        """Queue entries that another queue drained."""
        for entry in entries:
            self.add(Path(entry["path"]), entry["text"])

    def drain(self) -> list[dict[str, str]]:
        """Return what is queued as plain dicts, and forget it."""
        entries = [{"path": str(path), "text": text} for path, text in self.pending.items()]
        self.pending.clear()
        return entries

    def flush(self, mode: str | None) -> Written:
        """Write what `mode` lets be written, each file whole or not at all, in path order, and forget it."""
        errors = [f"{path} was given two texts in one run; neither is written" for path in sorted(self.clashing)]
        paths = []
        for path, text in sorted(self.pending.items()):
            if path in self.clashing or not accepts(mode, path):
                continue
            try:
                if write_whole(path, text):
                    paths.append(path)
            except OSError as error:
                errors.append(f"{path} could not be written: {error.strerror or error}")
        self.pending.clear()
        self.clashing.clear()
        return Written(tuple(paths), tuple(errors))

    def abandon(self, reason: str) -> Written:
        """Write nothing and say so, if anything was queued."""
        count = len(self.drain())
        return Written(errors=(f"{count} accepted, but {reason}",)) if count else Written()


def write_whole(path: Path, text: str) -> bool:
    """Write `text` (UTF-8) to `path` through a temporary file beside it; False if those bytes are there already."""
    import tempfile

    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
