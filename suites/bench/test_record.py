"""A stored measurement: what is read back is what was written, and damage is told in a sentence that names file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.bench.provenance import commit_of, machine_kind
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.errors import BenchmarkError
from suites.bench.records import fields, graph, record
from suites.cli.small_repository import SmallRepository


def test_what_is_written_is_what_is_read() -> None:
    data = fields(row="fp32", commit=None)
    assert Record.from_dict(json.loads(json.dumps(data)), "x").to_dict() == data
    assert Record.from_dict(data, "x").title == "plans/tiny.toml[fp32]"


def test_samples_are_tuples_and_a_record_made_of_tuples_is_the_same_json() -> None:
    read = record(warmup_rounds=(3, 3, 3))
    assert isinstance(read.samples["bucketed"][0], tuple)
    assert json.loads(json.dumps(read.to_dict())) == read.to_dict()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"format": 2}, "has format 2 and this version reads 1"),
        ({"format": None}, "has format None and this version reads 1"),
        ({"plan": 3}, "'plan' of the measurement is int and not text"),
        ({"row": 3}, "'row' of the measurement is int and not text"),
        ({"workload": []}, "'workload' of the measurement is list and not a table"),
        ({"dirty": 1}, "'dirty' of the measurement is int and not true or false"),
        ({"ranks": True}, "'ranks' of the measurement is bool and not a whole number"),
        ({"ranks": 0}, "'ranks' of the measurement is 0, and 1 is the least"),
        ({"machine": {"system": "Linux"}}, "'machine' of the measurement of which 'arch' is not there"),
        ({"time": "yesterday"}, "'time' of the measurement is 'yesterday' and not a time"),
        ({"time": "2026-11-21T23:00:00"}, "a time without a zone"),
        ({"capture_s": float("nan")}, "'capture_s' of the measurement has nan where seconds"),
        ({"samples": {"bucketed": [[0.1]]}}, "'samples' of the measurement lacks 'unbucketed'"),
        ({"samples": {"bucketed": [[0.1]], "unbucketed": [[0.1, 0.2]]}}, "has other rounds for 'unbucketed'"),
        ({"samples": {"bucketed": [[0.1], []], "unbucketed": [[0.1], []]}}, "holds no rounds"),
        ({"samples": {"bucketed": [[0.0]], "unbucketed": [[0.1]]}}, "has a step of no seconds"),
        ({"samples": {"bucketed": [[-1.0]], "unbucketed": [[0.1]]}}, "has -1.0 where seconds are expected"),
        ({"samples": {"bucketed": [["0.1"]], "unbucketed": [[0.1]]}}, "has '0.1' where seconds are expected"),
        ({"samples": {"bucketed": [[1e-12]], "unbucketed": [[0.1]]}}, "has a step of no seconds"),
        ({"samples": {"bucketed": [[1e7]], "unbucketed": [[0.1]]}}, "has 10000000.0 where seconds are expected"),
        ({"samples": {"bucketed": [[10**400]], "unbucketed": [[0.1]]}}, "has 1000000000"),
        ({"capture_s": 10**400}, "'capture_s' of the measurement has 1000000000"),
        ({"commit": "main"}, "'commit' of the measurement is 'main' and not the sha of a commit"),
        ({"commit": "--output=x" + "0" * 30}, "and not the sha of a commit"),
        ({"commit": "1" * 41}, "and not the sha of a commit"),
        ({"commit": 3}, "'commit' of the measurement is int and not text"),
        ({"workload": json.loads('{"a":' * 900 + "1" + "}" * 900)}, "is nested too deeply"),
        ({"warmup_rounds": 3}, "'warmup_rounds' of the measurement is int and not a list"),
        ({"graphs": {"bucketed": {"digest": "a"}}}, "has a graph 'bucketed' of which 'launches' is not there"),
        ({"graphs": {"bucketed": graph({"label": "x"})}}, "has a bucket of which 'direction' is not there"),
    ],
)
def test_damage_is_one_sentence_with_the_file_and_the_field(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(BenchmarkError) as told:
        Record.from_dict(fields(**changed), ".benchmarks/0001.json")
    text = str(told.value)
    assert text.startswith(".benchmarks/0001.json: ")
    assert says in text
    assert "measure again" in text
    assert len(text) < 300


@pytest.mark.parametrize("commit", [None, "0123456789abcdef" * 4, "f" * 40])
def test_shas_of_both_kinds_are_read(commit: str | None) -> None:
    assert record(commit=commit).commit == commit


@pytest.mark.parametrize("name", sorted(fields()))
def test_a_field_that_is_not_there_is_named(name: str) -> None:
    data = {key: value for key, value in fields().items() if key != name}
    with pytest.raises(BenchmarkError, match=name):
        Record.from_dict(data, "x.json")


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_no_table_is_damaged(data: object) -> None:
    with pytest.raises(BenchmarkError, match=r"x\.json: the stored measurement is no table"):
        Record.from_dict(data, "x.json")


class TestMachine:
    def test_the_kind_names_cpu_cores_and_gpus_and_no_host(self, tmp_path: Path) -> None:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD  EPYC 9B14\nstepping\t: 0\n")
        gpus = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n"
        kind = machine_kind(cpuinfo, lambda: gpus)
        assert (kind["cpu"], kind["gpus"]) == ("AMD EPYC 9B14", ["NVIDIA H200", "NVIDIA H200"])
        assert set(kind) == {"system", "arch", "cpu", "cores", "gpus"}

    def test_it_is_known_without_cpuinfo_and_without_gpus(self, tmp_path: Path) -> None:
        kind = machine_kind(tmp_path / "none", lambda: "")
        assert kind["cpu"]
        assert kind["gpus"] == []

    def test_the_kind_fits_a_record(self) -> None:
        assert record(machine=machine_kind()).machine == machine_kind()


class TestCommit:
    def test_a_clean_tree_is_its_commit_and_a_changed_or_new_file_of_code_makes_it_dirty(self, tmp_path: Path) -> None:
        repository = SmallRepository(tmp_path / "repository")
        sha = repository.commit(plan="a = 1\n")
        plan = repository.top / "plan.toml"
        assert commit_of(plan) == (sha, False)
        repository.write("notes.txt", "no code")
        repository.write("sub/.benchmarks/0001.toml", "stored")
        assert commit_of(plan) == (sha, False)
        new = repository.write("sub/model.py", "x = 1\n")
        assert commit_of(plan) == (sha, True)
        new.unlink()
        repository.write("pytest.ini", "[pytest]\naddopts = -q\n")
        assert commit_of(plan) == (sha, True)

    def test_stored_runs_that_are_committed_do_not_make_the_next_run_dirty(self, tmp_path: Path) -> None:
        repository = SmallRepository(tmp_path / "repository")
        stored = repository.write(".benchmarks/Linux/0001_a.json", "{}")
        sha = repository.commit(plan="a = 1\n")
        stored.write_text("{ }")
        assert commit_of(repository.top / "plan.toml") == (sha, False)

    def test_without_a_repository_there_is_no_commit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert commit_of(tmp_path / "plan.toml") == (None, False)
        repository = SmallRepository(tmp_path / "repository")
        assert commit_of(repository.top / "plan.toml") == (None, False)  # no commit yet
        repository.commit(plan="a = 1\n")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert commit_of(repository.top / "plan.toml") == (None, False)
