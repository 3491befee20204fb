"""``fxbucket goldens``: the comment on what changed in goldens since a commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.golden.store import render
from suites.cli.small_repository import BODY, SmallRepository

OTHER = BODY.replace("layers.0", "layers.1")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRepository:
    """One whose second commit has three goldens and a note."""
    made = SmallRepository(tmp_path / "repository")
    made.commit()
    for name in ("kept", "changed", "gone"):
        made.write(f"golden/plans/{name}.txt", render(BODY))
    made.write("golden/notes.txt", "no golden\n")
    made.commit()
    monkeypatch.chdir(made.top)
    return made


def test_each_golden_that_changed_has_its_words_and_its_diff(
    repository: SmallRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["goldens", "HEAD"]) == 0
    assert capsys.readouterr().out == "Goldens are as before.\n"
    assert main(["goldens", "HEAD~1"]) == 0
    assert capsys.readouterr().out.startswith("3 goldens of 3 changed.\n")
    repository.write("golden/plans/changed.txt", render(OTHER))
    repository.write("golden/plans/new.txt", render(BODY))
    repository.write("golden/plans/gone.txt", "").unlink()
    repository.write("golden/notes.txt", "other words\n")
    assert main(["goldens", "HEAD"]) == 0
    assert capsys.readouterr().out == (
        "3 goldens of 4 changed.\n\n"
        "**golden/plans/changed.txt**\n\n"
        "- forward: launch all_gather layers.0 is gone\n"
        "- forward: launch all_gather layers.1 is new\n\n"
        "```diff\n--- before\n+++ now\n@@ -4,3 +4,3 @@\n \n forward\n"
        "-  launch  all_gather layers.0\n+  launch  all_gather layers.1\n```\n\n"
        "**golden/plans/gone.txt** is gone\n\n"
        "**golden/plans/new.txt** is new\n"
    )


def test_what_cannot_be_read_says_why_and_other_things_are_no_goldens(
    repository: SmallRepository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository.top / "golden" / "folder.txt").mkdir()
    (repository.top / "golden" / "leads_nowhere.txt").symlink_to("nowhere")
    assert main(["goldens", "HEAD"]) == 0
    assert capsys.readouterr().out == "Goldens are as before.\n"
    emptied = repository.top / "golden" / "plans" / "changed.txt"
    before = emptied.read_text()
    emptied.write_text("")
    assert main(["goldens", "HEAD"]) == 0
    assert "**golden/plans/changed.txt**\n\ncannot be compared: the new one is not a golden" in capsys.readouterr().out
    emptied.write_text(before)

    def unreadable(path: Path, **_: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert main(["goldens", "HEAD"]) == 0
    assert "**golden/plans/changed.txt** cannot be read: Permission denied\n" in capsys.readouterr().out


def test_a_folder_that_is_a_link_and_what_a_sparse_checkout_leaves_out_are_as_before(
    repository: SmallRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("golden").rename("reviewed")
    Path("golden").symlink_to("reviewed")
    repository.commit()
    assert main(["goldens", "HEAD"]) == 0
    assert capsys.readouterr().out == "Goldens are as before.\n"
    repository.git("sparse-checkout", "set", "--no-cone", "/*", "!/reviewed/plans/gone.txt")
    assert not Path("golden/plans/gone.txt").exists()
    repository.write("golden/plans/changed.txt", render(OTHER))
    assert main(["goldens", "HEAD"]) == 0
    assert capsys.readouterr().out.startswith("1 golden of 2 changed.\n\n**reviewed/plans/changed.txt**\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_need_not_be_text_of_any_encoding(repository: SmallRepository, encoding: str) -> None:
    """Of files that are no goldens, and of goldens where Python takes names for ASCII."""
    repository.write("golden/plans/größe.txt", render(BODY))
    Path(os.fsdecode(b"golden/gr\xf6.txt")).write_text("no golden\n")
    repository.commit()
    repository.write("golden/plans/größe.txt", render(OTHER))
    # Python reads how it is to take names when it starts.
    own = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} if encoding == "ascii" else {}
    command = [sys.executable, "-m", "pytest_fxbucket.cli", "goldens", "HEAD"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "utf-8", **own}, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.decode().startswith("1 golden of 4 changed.\n\n**golden/plans/größe.txt**\n")


def test_what_is_too_long_for_a_comment_is_counted(
    repository: SmallRepository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_fxbucket.cli.goldens._LONGEST", 100)
    for name in ("kept", "changed", "gone"):
        repository.write(f"golden/plans/{name}.txt", "").unlink()
    assert main(["goldens", "HEAD"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("**golden/plans/gone.txt** is gone\n\nAnd 1 more golden.\n")


def test_a_golden_that_cannot_be_read_says_why(repository: SmallRepository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.write("golden/plans/changed.txt", render(BODY) + "edited\n")
    assert main(["goldens", "HEAD"]) == 0
    assert "cannot be compared: the new one has text behind its last line, 'edited'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mian"], 'BASE mian is no commit of {top}; did you mean "main"?'),
        (["HEAD", "goldens"], "goldens has no golden, neither now nor at HEAD; say where goldens are"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    repository: SmallRepository, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["goldens", *words]) == 2
    assert capsys.readouterr().err == f"fxbucket: {said.format(top=repository.top.resolve())}\n"
