"""Test files as they were when the run began, so that an edit is made of no other text."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.golden.disk import digest


@dataclass(slots=True)
class Sources:
    """Source files as they were when the run began; the first look counts."""

    digests: dict[str, str] = field(default_factory=dict)

    def note(self, path: Path) -> None:
        """Remember what ``path`` holds now, unless it was noted before; a file that cannot be read is left out."""
        name = os.path.realpath(path)
        if name not in self.digests:
            try:
                self.digests[name] = digest(Path(name).read_bytes())
            except OSError:
                return

    def read(self, path: str, shown: str) -> bytes:
        """What ``path`` holds, which is what it held when the run began; UsageError if it is not."""
        self.note(Path(path))
        try:
            source = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"{shown} cannot be read: {error.strerror or error}") from None
        if self.digests.get(path) != digest(source):
            raise UsageError(f"{shown} was changed since the run began, so its expectations are left alone; run again")
        return source
