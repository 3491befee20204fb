"""A repository for ``fxbucket diff --at``, and what no test may leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from suites.cli.small_repository import SmallRepository


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRepository:
    """A repository, in which the test is; temporary files lie beside it."""
    found = SmallRepository(tmp_path / "project")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.chdir(found.top)
    return found


@pytest.fixture
def untouched(repository: SmallRepository, tmp_path: Path) -> Iterator[None]:
    """Asked after the test: no worktree and no temporary file is left."""
    yield
    assert repository.git("worktree", "list").count("\n") == 1
    assert [path for path in (tmp_path / "temporary").iterdir() if not path.name.startswith("torchinductor")] == []
