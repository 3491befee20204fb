"""Files that a command writes anew, and never over what is there."""

from __future__ import annotations

from pathlib import Path

from pytest_fxbucket.errors import FxbucketError, UsageError


def refuse_present(*paths: Path) -> None:
    """Raise UsageError for the first of ``paths`` that is there, which is left as it is."""
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} is already there and is left as it is; name another file with --out, or remove it")


def write_new(path: Path, text: str) -> None:
    """Write ``text`` and the folders above it. Raises FxbucketError if that cannot be done, or if the file is there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise FxbucketError(f"{path} cannot be written: {error.strerror or error}") from error
