"""A stored measurement: what is read back is what was written, and damage is told in a sentence that names file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.bench.provenance import commit_of, machine_kind
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.errors import BenchmarkError
from suites.bench.records import MACHINE, bucket, fields, graph, record
from suites.cli.small_repository import SmallRepository


def test_what_is_written_is_what_is_read() -> None:
    data = fields(row="fp32", commit=None)
    assert Record.from_dict(json.loads(json.dumps(data)), "x").to_dict() == data
    read = Record.from_dict(data, "x")
    assert read.title == "plans/tiny.toml[fp32]"
    assert isinstance(read.samples["bucketed"][0], tuple)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"format": 2}, "has format 2 and this version reads 1"),
        ({"format": None}, "has format None and this version reads 1"),
        ({"format": True}, "has format True and this version reads 1"),
        ({"format": "x" * 1000}, "has format xxx"),
        ({"plan": 3}, "Expected `str`, got `int` - at `$.plan`"),
        ({"row": 3}, "Expected `str | null`, got `int` - at `$.row`"),
        ({"workload": []}, "Expected `object`, got `array` - at `$.workload`"),
        ({"workload": json.loads('{"a":' * 900 + "1" + "}" * 900)}, "`workload` is nested too deeply"),
        ({"workload": json.loads('{"a":' * 64 + "1" + "}" * 64)}, "`workload` is nested too deeply"),
        ({"dirty": 1}, "Expected `bool`, got `int` - at `$.dirty`"),
        ({"ranks": True}, "Expected `int`, got `bool` - at `$.ranks`"),
        ({"ranks": 0}, "Expected `int` >= 1 - at `$.ranks`"),
        ({"machine": {"system": "Linux"}}, "missing required field `arch` - at `$.machine`"),
        ({"machine": {**MACHINE, "cores": 0}}, "Expected `int` >= 1 - at `$.machine.cores`"),
        ({"time": "yesterday"}, "`time` is no time with a zone"),
        ({"time": "2026-11-21T23:00:00"}, "`time` is no time with a zone"),
        ({"capture_s": float("nan")}, "- at `$.capture_s`"),
        ({"pass_s": float("nan")}, "- at `$.pass_s`"),
        ({"capture_s": 10**400}, "- at `$.capture_s`"),
        ({"samples": {"bucketed": [[0.1]]}}, "`samples` lacks 'unbucketed'"),
        ({"samples": {"bucketed": [[0.1]], "unbucketed": [[0.1, 0.2]]}}, "other rounds for one variant"),
        ({"samples": {"bucketed": [[0.1], []], "unbucketed": [[0.1], []]}}, "length >= 1 - at `$.samples[...][1]`"),
        ({"samples": {"bucketed": [], "unbucketed": []}}, "length >= 1 - at `$.samples[...]`"),
        ({"samples": {"bucketed": [["0.1"]], "unbucketed": [[0.1]]}}, "got `str` - at `$.samples[...][0][0]`"),
        ({"samples": {"bucketed": [[1e-12]], "unbucketed": [[0.1]]}}, "- at `$.samples[...][0][0]`"),
        ({"samples": {"bucketed": [[1e7]], "unbucketed": [[0.1]]}}, "- at `$.samples[...][0][0]`"),
        ({"commit": "main"}, "- at `$.commit`"),
        ({"commit": "--output=x" + "0" * 30}, "- at `$.commit`"),
        ({"commit": "1" * 41}, "- at `$.commit`"),
        ({"commit": "1" * 40 + "\n"}, "- at `$.commit`"),
        ({"warmup_rounds": [-1]}, "Expected `int` >= 0 - at `$.warmup_rounds[0]`"),
        ({"graphs": {"bucketed": {"digest": "a"}}}, "missing required field `launches` - at `$.graphs[...]`"),
        ({"graphs": {"bucketed": graph({**bucket("x"), "exposed_s": -1})}}, "- at `$.graphs[...].buckets[0].exposed_s`"),
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
    assert "\n" not in text


@pytest.mark.parametrize("commit", [None, "0123456789abcdef" * 4, "f" * 40])
def test_shas_of_both_kinds_are_read(commit: str | None) -> None:
    assert record(commit=commit).commit == commit


@pytest.mark.parametrize("name", sorted(fields()))
def test_a_field_that_is_not_there_is_named(name: str) -> None:
    data = {key: value for key, value in fields().items() if key != name}
    with pytest.raises(BenchmarkError, match=name):
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
