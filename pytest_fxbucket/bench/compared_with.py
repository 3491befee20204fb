"""What ``--fxbucket-compare`` names, checked before anything is run."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from pytest_fxbucket.bench.stored import LATEST
from pytest_fxbucket.commit.repository import Repository
from pytest_fxbucket.errors import UsageError

_EXPECTED = "latest, a file of pytest-benchmark, or a commit such as main or HEAD~1"


def compared_with(text: str, where: str, base: Path, plan: Path) -> str:
    """`text` as it is kept: "latest", the absolute path of a file, or a commit as it was named.

    `where` names the option in errors, `base` is the folder of relative paths, `plan` a file of the repository whose commits
    are meant. Raises FxbucketError, one sentence, for what is neither.
    """
    text = text.strip()
    if not text:
        raise UsageError(f"{where}: nothing is given; expected {_EXPECTED}")
    path = Path(os.path.normpath(base / text))
    if text == LATEST:
        return text
    if path.is_file():
        return str(path)
    if path.suffix == ".json":
        raise UsageError(f"{where}: {text} is not there{_nearest(path, text)}")
    try:
        Repository.of(plan, where).commit(text)
    except UsageError as error:
        is_latest = get_close_matches(text.lower(), [LATEST], cutoff=0.8) and "did you mean" not in str(error)
        raise UsageError(f"{error}{f'; did you mean {LATEST}?' if is_latest else ''}") from None
    return text


def _nearest(path: Path, text: str) -> str:
    near = get_close_matches(path.name, sorted(each.name for each in path.parent.glob("*.json")), n=1)
    return f"; did you mean {Path(text).parent / near[0]}?" if near else ""
