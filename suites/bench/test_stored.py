"""Which stored run is meant: the newest, a file's, or a commit's; a damaged one is an error, never passed over for an older."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_fxbucket.bench.store import compared_with, find, run_files, runs_of, same_files
from pytest_fxbucket.commit import Repository
from pytest_fxbucket.errors import BenchmarkError, FxbucketError, UsageError
from suites.bench.records import MACHINE, fields, record
from suites.bench.storage import KIND, PLAN, Project, file_of, file_text, found

TIMES = {1: "2026-11-21T10:01:00+00:00"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def remove(project: Project, *numbers: int) -> Project:
    for number in numbers:
        (project.storage / KIND / f"{number:04}_run.json").unlink()
    return project


class TestLatest:
    def test_it_is_the_newest_by_its_time_over_all_folders(self, project: Project) -> None:
        project.store(7)
        project.store(2, kind="Linux-CPython-3.12-64bit", time="2026-11-22T10:00:00+00:00")
        project.store(3, kind=".")
        assert file_of(found("latest", project)) == "0002_run.json"

    def test_times_of_other_zones_are_compared_as_times(self, project: Project) -> None:
        project.store(1, time="2026-11-21T10:00:00+00:00")
        project.store(2, time="2026-11-21T11:30:00+02:00", kind="other")
        assert file_of(found("latest", project)) == "0001_run.json"

    def test_in_a_folder_numbers_say_what_is_newer_whatever_a_clock_said(self, project: Project) -> None:
        project.store(1, time="2026-11-21T10:00:00+00:00")
        project.store(2, time="2040-01-01T00:00:00+00:00")
        assert file_of(found("latest", project)) == "0002_run.json"
        project.store(3, time="2026-11-21T10:01:00+00:00")
        assert file_of(found("latest", project)) == "0003_run.json"
        project.store(1, kind="other", time="2026-11-21T10:02:00+00:00", dirty=True)
        assert found("latest", project).note.startswith("newer, but passed over: .benchmarks/other/0001_run.json")

    def test_a_run_dated_in_the_future_is_not_the_newest_of_all_folders_for_ever(self, project: Project) -> None:
        project.store(1, time="2026-11-21T10:00:00+00:00")
        project.store(2, time="2040-01-01T00:00:00+00:00")
        project.store(5, kind="alone", time="0001-01-01T00:00:00+14:00")
        project.store(6, kind="alone", time="9999-12-31T23:59:59-14:00")
        project.store(1, kind="other", time="2026-11-21T10:01:00+00:00")
        assert found("latest", project).run.file.parent.name == "other"  # type: ignore[union-attr]  # there is one

    def test_of_the_same_pass_and_of_a_clean_tree_come_first_and_what_is_passed_over_is_said(self, project: Project) -> None:
        project.store(1)
        project.store(2, **{"pass": "torch"})
        project.store(3, dirty=True)
        project.store(4, machine={**MACHINE, "cores": 64})
        project.store(5, compared="failed")
        it = found("latest", project)
        assert file_of(it) == "0001_run.json"
        assert file_of(found(str(project.storage / KIND / "0005_run.json"), project)) == "0005_run.json"
        where = f".benchmarks/{KIND}/000"
        assert it.note == (
            f"newer, but passed over: {where}5_run.json (a regression itself, or never judged), {where}4_run.json "
            f"(not comparable: another machine: cores was 64 and is 2), {where}3_run.json (of a dirty work tree) and 1 more"
        )
        assert f"{where}2_run.json (of pass torch)" in found("latest", remove(project, 4, 5)).note
        assert file_of(found("latest", remove(project, 1))) == "0003_run.json"
        assert file_of(found("latest", remove(project, 3))) == "0002_run.json"

    def test_a_test_s_own_measurement_is_not_the_plan_s(self, project: Project) -> None:
        project.store(1)
        project.store(2, test="test_speed.py::test_it")
        assert file_of(found("latest", project)) == "0001_run.json"
        assert file_of(found("main", project)) == "0001_run.json"
        assert runs_of(record(), project.storage, project.top)[0] == [record(commit=project.first, seed=1, time=TIMES[1])]

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

    def test_the_item_of_a_row_is_named_as_pytest_takes_it(self, project: Project) -> None:
        assert (
            "; to store one, run plans/tiny.toml::benchmark[row] with --benchmark-autosave"
            in found("latest", project, row="row").note
        )

    def test_of_regressions_alone_there_is_no_latest(self, project: Project) -> None:
        project.store(1, compared="failed")
        note = found("latest", project).note
        assert note.startswith(
            "all stored runs of plans/tiny.toml in .benchmarks are regressions, or were never judged; to store one, "
        )
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

    @pytest.mark.parametrize("storage", [".benchmarks", "speed[1]*", "a\\\\b"])
    def test_code_within_the_storage_counts_and_runs_of_any_depth_do_not(self, project: Project, storage: str) -> None:
        project.storage = project.top / storage
        for name in ("0001_a.json", "Linux/0001_a.json", "Linux/old/0001_a.json"):
            project.write(f"{storage}/{name}", "{}")
        second = project.commit()
        same = same_files(Repository.of(project.top / PLAN), second, project.storage)
        assert same(project.first)
        for name in (f"{storage}/conftest.py", f"{storage}/notes.json", "speed1x/0001_a.json"):
            project.write(name, "x = 1\n")
            changed = project.commit()
            assert not same_files(Repository.of(project.top / PLAN), changed, project.storage)(second)
            second = changed

    def test_what_is_no_sha_is_no_option_of_git(self, project: Project, tmp_path: Path) -> None:
        same = same_files(Repository.of(project.top / PLAN), project.first, project.storage)
        assert not same(f"--output={tmp_path / 'written'}")
        assert not (tmp_path / "written").exists()

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
    def test_as_the_newest_it_is_an_error_that_names_it(self, project: Project) -> None:
        project.store(1)
        newest = project.store(2)
        for damage, (content, says) in DAMAGE.items():
            newest.write_bytes(content)
            with pytest.raises(BenchmarkError) as told:
                found("latest", project)
            assert str(told.value).startswith(f".benchmarks/{KIND}/0002_run.json"), damage
            assert says in str(told.value), damage
            assert "measure again" in str(told.value), damage
            assert "\n" not in str(told.value), damage
            with pytest.raises(BenchmarkError):
                found(str(newest), project)

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
