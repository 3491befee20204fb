"""A folder of finds: a test each, which pytest runs, and which a later search begins with."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.files import write_whole
from pytest_fxbucket.fuzz.judge import judged
from pytest_fxbucket.fuzz.printed import text_of_test, trial_in

if TYPE_CHECKING:
    from pytest_fxbucket.fuzz.finds import Find
    from pytest_fxbucket.fuzz.trial import Trial
    from pytest_fxbucket.fuzz.tried_pass import Subject


@dataclass(frozen=True)
class Kept:
    """A find and the file that it lies in."""

    path: Path
    text: str
    find: Find


def files_in(folder: Path) -> list[Path]:
    """Tests of ``folder`` in the order of their names; none if there is no such folder."""
    return sorted(folder.glob("test_fuzz_*.py"))


def replayed(path: Path, subject: Subject) -> Kept | None:
    """What is still found with the file ``path``; None if it is mended. Raises FxbucketError for a file that holds no trial."""
    trial, kind = trial_in(path)
    find = judged(trial, subject, kind)
    return None if find is None else Kept(path, path.read_text(encoding="utf-8"), find)


def keep(folder: Path, trial: Trial, find: Find, name: str) -> Kept:
    """Write the test of ``find`` against the pass ``name``. Raises FxbucketError if it cannot be written."""
    text = text_of_test(trial, find, name)
    number = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = folder / f"test_fuzz_{re.sub(r'[^a-z]+', '_', find.kind)}_{number}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise FxbucketError(f"{path} cannot be written: {error.strerror or error}") from error
    return Kept(path, text, find)
