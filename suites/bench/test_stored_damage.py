"""Stored files that are damaged: an error that names the file, and never passed over for an older run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_fxbucket.bench.store import runs_of
from pytest_fxbucket.errors import BenchmarkError
from suites.bench.records import MACHINE, fields, record
from suites.bench.storage import KIND, Project, file_of, file_text, found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


DAMAGE = {
    "empty": (b"", "is damaged, as it is no JSON"),
    "cut short": (file_text(fields()).encode()[:400], "is damaged, as it is no JSON"),
    "no UTF-8": (b"\xff\xfe{", "is damaged, as it is no JSON"),
    "a list": (b"[]", 'has no list "benchmarks"'),
    "another file": (b'{"benchmarks": {}}', 'has no list "benchmarks"'),
    "an entry that is none": (b'{"benchmarks": [3]}', "an entry of it is no table"),
    "no extra info": (b'{"benchmarks": [{"extra_info": null}]}', "an entry of it is no table"),
    **{
        f"a measurement that is {text}": (
            f'{{"benchmarks": [{{"extra_info": {{"fxbucket": {text}}}}}]}}'.encode(),
            "is damaged: Expected `object`",
        )
        for text in ("null", "3")
    },
    "a plan that is no text": (file_text(fields(plan=["plans/tiny.toml"])).encode(), "got `array` - at `$.plan`"),
    "a plan that is null": (file_text(fields(plan=None)).encode(), "got `null` - at `$.plan`"),
    "a row that is no text": (file_text(fields(row=False)).encode(), "got `bool` - at `$.row`"),
    "nested too deeply": (b'{"benchmarks":' + b"[" * 100_000, "nested too deeply"),
    "a number of 5000 digits": (
        file_text(fields(capture_s=0)).replace('"capture_s": 0', f'"capture_s": {"9" * 5000}').encode(),
        "no JSON",
    ),
    "damaged samples": (file_text(fields(samples={})).encode(), "`samples` lacks 'bucketed'"),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_as_the_newest_it_is_an_error_that_names_it(self, project: Project, damage: str) -> None:
        content, says = DAMAGE[damage]
        project.store(1)
        project.store(2).write_bytes(content)
        with pytest.raises(BenchmarkError) as told:
            found("latest", project)
        assert str(told.value).startswith(f".benchmarks/{KIND}/0002_run.json")
        assert says in str(told.value)
        assert "measure again" in str(told.value)
        assert "\n" not in str(told.value)
        with pytest.raises(BenchmarkError):
            found(str(project.storage / KIND / "0002_run.json"), project)

    def test_an_older_one_is_no_matter_beside_a_newer_run_of_the_plan(self, project: Project) -> None:
        project.store(1).write_text("{")
        project.store(2)
        assert file_of(found("latest", project)) == "0002_run.json"
        project.store(3, plan="plans/other.toml").write_text("{")
        project.store(4, plan="plans/other.toml")
        with pytest.raises(BenchmarkError, match="0003_run"):
            found("latest", project)

    def test_between_the_run_that_is_taken_and_newer_ones_that_are_not_it_is_an_error(self, project: Project) -> None:
        project.store(1)
        project.store_text(2, "{")
        for worse in ({"compared": "failed"}, {"machine": {**MACHINE, "cores": 64}}, {"dirty": True}, {"pass": "torch"}):
            project.store(3, **worse)
            with pytest.raises(BenchmarkError, match="0002_run"):
                found("latest", project)

    def test_where_the_run_that_is_taken_is_second_best_an_older_one_is_an_error_too(self, project: Project) -> None:
        project.store_text(1, "{")
        for worse in ({"machine": {**MACHINE, "cores": 64}}, {"dirty": True}, {"pass": "torch"}):
            project.store(2, **worse)
            with pytest.raises(BenchmarkError, match="0001_run"):
                found("latest", project)

    def test_in_another_folder_it_is_an_error_unless_a_later_one_there_is_older(self, project: Project) -> None:
        project.store(7)
        project.store_text(2, "{", "other")
        project.store(1, kind="other")
        with pytest.raises(BenchmarkError, match="0002_run"):
            found("latest", project)
        project.store(3, kind="other")
        assert file_of(found("latest", project)) == "0007_run.json"
        project.store(8, kind="other")
        project.store(8, name="same", kind="other").write_text("{")  # of one number, as after a merge
        with pytest.raises(BenchmarkError, match="0008_same"):
            found("latest", project)

    def test_any_may_hold_the_run_of_a_commit(self, project: Project) -> None:
        project.store_text(1, "{")
        project.store(2)
        with pytest.raises(BenchmarkError, match="0001_run"):
            found("main", project)

    @pytest.mark.parametrize("kind", [KIND, "."])
    def test_what_is_called_like_a_run_and_is_no_file_is_an_error(self, project: Project, kind: str) -> None:
        project.store(1, kind=kind)
        odd = project.storage / kind / "0009_odd.json"
        for make, says in (
            (odd.mkdir, "is no file"),
            (lambda: os.mkfifo(odd), "is no file"),
            (lambda: odd.symlink_to("gone"), "cannot be read: No such file"),
            (lambda: odd.symlink_to(odd), "cannot be read: "),
        ):
            make()
            with pytest.raises(BenchmarkError, match=f"0009_odd.json .*{says}"):
                found("latest", project)
            odd.rmdir() if odd.is_dir() else odd.unlink()

    def test_a_page_shows_what_can_be_read_and_says_what_cannot(self, project: Project) -> None:
        project.store(3)
        project.store(1)
        project.store_text(2, "{")
        (project.storage / "0004_gone.json").symlink_to("gone")
        runs, unread = runs_of(record(), project.storage, project.top)
        assert [run.time[14:16] for run in runs] == ["01", "03"]
        assert [sentence.partition(" ")[0] for sentence in unread] == [
            ".benchmarks/0004_gone.json",
            f".benchmarks/{KIND}/0002_run.json",
        ]

    def test_a_file_that_cannot_be_read_is_said(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        file = project.store(1)
        with pytest.raises(BenchmarkError, match="cannot be read: No such file or directory"):
            found(str(file.with_name("gone.json")), project)

        def refuse(self: Path, encoding: str) -> str:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_text", refuse)  # root may read everything
        with pytest.raises(BenchmarkError, match=r"0001_run\.json cannot be read: Permission denied"):
            found(str(file), project)

    def test_entries_of_others_are_left_alone(self, project: Project) -> None:
        text = '{"benchmarks": [{}, {"extra_info": {}}, {"extra_info": {"mine": 3}}]}'
        assert found(str(project.write("a.json", text)), project).run is None
