"""The command as tests run it, a repository for ``fxbucket diff --at``, and what no test may leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
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


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str], int, str], str]:
    """Run a command that cannot be done: its status, a sentence on stderr that says this, and nothing on stdout."""

    def run(words: list[str], status: int, says: str) -> str:
        capsys.readouterr()
        assert main(words) == status
        said = capsys.readouterr()
        assert says in said.err
        assert said.out == ""
        assert "Traceback" not in said.err
        return said.err

    return run
