"""Which stored run is meant: the newest, a file's, a commit's; and a damaged file is never passed over for an older run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_fxbucket.bench.compared_with import compared_with
from pytest_fxbucket.bench.stored import Found, find
from pytest_fxbucket.bench.stored_files import run_files
from pytest_fxbucket.errors import BenchmarkError, FxbucketError, UsageError
from suites.bench.records import MACHINE, fields, record
from suites.bench.storage import KIND, PLAN, Project, file_text


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def found(what: str, project: Project, **now: object) -> Found:
    return find(what, record(**{"commit": None, **now}), project.storage, project.top)  # type: ignore[arg-type]


def file_of(it: Found) -> str:
    assert it.run is not None, it.note
    return it.run.file.name


class TestLatest:
    def test_it_is_the_newest_by_its_time_over_all_folders(self, project: Project) -> None:
        project.store(7)
        project.store(2, kind="Linux-CPython-3.12-64bit", time="2026-11-22T10:00:00+00:00")
        project.store(3, kind=".")
        assert file_of(found("latest", project)) == "0002_run.json"

    def test_times_of_other_zones_are_compared_as_times(self, project: Project) -> None:
        project.store(1, time="2026-11-21T10:00:00+00:00")
        project.store(2, time="2026-11-21T11:30:00+02:00")
        assert file_of(found("latest", project)) == "0001_run.json"

    def test_runs_of_other_plans_and_rows_are_not_it(self, project: Project) -> None:
        project.store(1, row=None)
        project.store(2, row="keep")
        project.store(3, plan="plans/other.toml")
        assert file_of(found("latest", project)) == "0001_run.json"
        assert file_of(found("latest", project, row="keep")) == "0002_run.json"

    def test_numbers_beyond_9999_are_read(self, project: Project) -> None:
        project.store(9999, time="2026-11-21T10:00:00+00:00")
        project.store(10000, time="2026-11-21T11:00:00+00:00")
        assert file_of(found("latest", project)) == "10000_run.json"
        project.store(10001, time="2026-11-21T11:00:00+00:00")
        project.store(99, time="2026-11-21T11:00:00+00:00")  # two of one second are told by their numbers
        assert file_of(found("latest", project)) == "10001_run.json"

    def test_a_newer_run_of_another_machine_is_passed_over_and_said(self, project: Project) -> None:
        project.store(1)
        project.store(2, machine={**MACHINE, "cores": 64})
        it = found("latest", project)
        assert file_of(it) == "0001_run.json"
        assert it.note.startswith(
            f"newest, but not comparable: .benchmarks/{KIND}/0002_run.json, another machine: cores was 64"
        )

    def test_without_a_run_it_says_how_to_store_one(self, project: Project) -> None:
        project.store(1, plan="plans/other.toml")
        it = found("latest", project)
        assert it.run is None
        assert it.note == (
            "there is no stored run of plans/tiny.toml in .benchmarks; to store one, run plans/tiny.toml::benchmark with "
            "--benchmark-autosave"
        )
        shutil.rmtree(project.storage)
        assert found("latest", project).run is None

    def test_a_run_that_was_a_regression_is_not_what_the_next_one_is_measured_by(self, project: Project) -> None:
        project.store(1)
        project.store(2, compared="failed")
        assert file_of(found("latest", project)) == "0001_run.json"
        assert file_of(found(str(project.storage / KIND / "0002_run.json"), project)) == "0002_run.json"
        project.store(3, compared="passed")
        project.store(4, compared="skipped")
        assert file_of(found("latest", project)) == "0004_run.json"

    def test_of_regressions_alone_there_is_no_latest(self, project: Project) -> None:
        project.store(1, compared="failed")
        note = found("latest", project).note
        assert note.startswith("all stored runs of plans/tiny.toml in .benchmarks are regressions; to store one, ")
        assert note.endswith("::benchmark with --benchmark-autosave and without --fxbucket-compare")

    def test_foreign_files_are_none_of_the_stored_runs(self, project: Project) -> None:
        file = project.store(1)
        for name in (
            "notes.json",
            "001_short.json",
            "abcd_x.json",
            "0002_x.txt",
            ".fxbucket-abcdefgh.tmp",
            "\u0662\u0662\u0662\u0662_x.json",
        ):
            (file.parent / name).write_text("{")
        (file.parent / "0009_folder.json").mkdir()
        assert run_files(project.storage) == [file]


class TestFile:
    def test_it_is_read_wherever_it_lies_and_whatever_its_name(self, project: Project, tmp_path: Path) -> None:
        (tmp_path / "elsewhere.txt").write_text(file_text(fields()))
        assert file_of(found(str(tmp_path / "elsewhere.txt"), project)) == "elsewhere.txt"

    def test_it_wins_over_a_branch_of_its_name(self, project: Project) -> None:
        project.write("speed", file_text(fields()))
        project.git("branch", "speed")
        assert file_of(found(compared_with("speed", "x", project.top, project.top / PLAN), project)) == "speed"

    def test_without_the_plan_it_is_said(self, project: Project) -> None:
        file = project.write("a.json", file_text(fields(row="x")))
        assert found(str(file), project).note.startswith("a.json holds no run of plans/tiny.toml; to store one")


class TestCommit:
    @pytest.mark.parametrize("name", ["main", "v1", "HEAD", None])
    def test_a_branch_a_tag_or_a_sha_names_the_run_of_its_commit(self, project: Project, name: str | None) -> None:
        project.git("tag", "v1")
        project.store(1)
        project.store(2, commit="2" * 40)
        assert file_of(found(name or project.first[:8], project)) == "0001_run.json"

    def test_a_dirty_run_is_taken_only_if_there_is_no_other(self, project: Project) -> None:
        project.store(1)
        project.store(2, dirty=True)
        assert file_of(found("main", project)) == "0001_run.json"
        (project.storage / KIND / "0001_run.json").unlink()
        assert file_of(found("main", project)) == "0002_run.json"

    def test_a_run_counts_for_the_commit_that_stores_it(self, project: Project) -> None:
        project.store(1)
        project.commit()
        assert file_of(found("main", project)) == "0001_run.json"
        project.write("model.py", "x = 1\n")
        project.commit()
        it = found("main", project)
        assert it.run is None
        assert f"no stored run of {PLAN} at main (" in it.note
        assert f"stored are runs of {project.first[:7]}; to store one" in it.note

    def test_an_unknown_one_is_refused_with_the_nearest_name(self, project: Project) -> None:
        with pytest.raises(UsageError, match=r'^--fxbucket-compare mian is no commit of .*; did you mean "main"\?$'):
            found("mian", project)

    def test_outside_a_repository_there_are_none(self, project: Project, tmp_path: Path) -> None:
        with pytest.raises(FxbucketError, match="in no git working tree, so --fxbucket-compare has no commits to look in"):
            find("main", record(), project.storage, tmp_path)

    def test_stored_runs_that_are_committed_are_found_after_a_fresh_clone(self, project: Project, tmp_path: Path) -> None:
        project.store(1)
        project.store(2, kind="Linux-CPython-3.12-64bit")
        project.commit()
        there = tmp_path / "other" / "clone"
        subprocess.run(["git", "clone", "-q", str(project.top), str(there)], check=True)
        shutil.rmtree(project.top)
        for what in ("latest", "main", "HEAD~1", str(there / ".benchmarks" / KIND / "0001_run.json")):
            it = find(what, record(commit=None, seed=9), there / ".benchmarks", there)
            assert it.run is not None
            assert it.run.record.title == PLAN


DAMAGE = {
    "empty": (b"", "is damaged, as it is no JSON"),
    "cut short": (file_text(fields()).encode()[:400], "is damaged, as it is no JSON"),
    "no UTF-8": (b"\xff\xfe{", "is damaged, as it is no JSON"),
    "a list": (b"[]", 'has no list "benchmarks"'),
    "another file": (b'{"benchmarks": {}}', 'has no list "benchmarks"'),
    "another version": (file_text(fields(format=2)).encode(), "has format 2 and this version reads 1"),
    "damaged samples": (file_text(fields(samples={})).encode(), "'samples' of the measurement lacks 'bucketed'"),
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

    def test_a_commit_that_is_found_is_found(self, project: Project) -> None:
        project.store(1)
        project.store(2).write_text("{")
        assert file_of(found("main", project)) == "0001_run.json"
        (project.storage / KIND / "0001_run.json").unlink()
        with pytest.raises(BenchmarkError, match="0002_run"):
            found("main", project)

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
        text = '{"benchmarks": [3, {}, {"extra_info": null}, {"extra_info": {"fxbucket": 3}}]}'
        assert found(str(project.write("a.json", text)), project).run is None
