"""Within pytest-benchmark: runs that are interrupted save what they measured, and its own commands read what is stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from suites.bench.records import fields
from suites.bench.storage import file_text

ITEMS = """
import json
from pathlib import Path

ROW = json.loads(Path(__file__).with_name("record.json").read_text())

now = [0.0]

def clock():
    return now[0]

def feed(benchmark, variant):
    samples = iter([s for rounds in ROW["samples"][variant] for s in rounds])
    def step():
        now[0] += next(samples)
    benchmark.extra_info["fxbucket"] = (
        ROW if variant == "bucketed" else {"format": 1, "plan": ROW["plan"], "row": None, "variant": variant}
    )
    benchmark.pedantic(step, rounds=180)

import pytest
@pytest.mark.benchmark(timer=clock, group="plans/tiny.toml")
@pytest.mark.parametrize("variant", ["bucketed", "unbucketed"])
def test_step(benchmark, variant):
    feed(benchmark, variant)
"""
INTERRUPTED = """
def test_interrupted(benchmark):
    def go():
        raise KeyboardInterrupt
    benchmark.pedantic(go, rounds=3)
"""


@pytest.fixture
def steps(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project whose items store a plan's measurement."""
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(test_steps=ITEMS)
    Path("record.json").write_text(json.dumps(fields()))
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    return project.runpytest_subprocess("-q", "-p", "no:xdist", *args, timeout=120)


def stored(project: pytest.Pytester) -> list[Path]:
    return sorted((project.path / ".benchmarks").glob("*/*"))


def entries(path: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(path.read_text())["benchmarks"]}


class TestInterrupted:
    def test_ctrl_c_saves_the_items_that_are_done_and_neither_it_nor_a_kill_touches_older_runs(
        self, steps: pytest.Pytester
    ) -> None:
        steps.makepyfile(test_x=INTERRUPTED)
        first = steps.path / ".benchmarks" / "kind" / "0001_run.json"
        first.parent.mkdir(parents=True)
        first.write_text(file_text(fields()))
        result = run(steps, "--benchmark-autosave", "--benchmark-json=all.json", "test_steps.py", "test_x.py")
        assert result.ret == pytest.ExitCode.INTERRUPTED
        assert first.read_text() == file_text(fields())
        (second,) = (path for path in stored(steps) if path != first)
        assert set(entries(second)) == set(entries(Path("all.json"))) == {"test_step[bucketed]", "test_step[unbucketed]"}
        assert entries(second)["test_step[bucketed]"]["extra_info"]["fxbucket"] == fields()
        assert "ValueError" not in result.stdout.str() + result.stderr.str()
        steps.makepyfile(test_x="import os\ndef test_killed(benchmark):\n    benchmark(lambda: os.kill(os.getpid(), 9))\n")
        before = {path: path.read_bytes() for path in stored(steps)}
        assert run(steps, "--benchmark-autosave", "test_steps.py", "test_x.py").ret == -9
        assert {path: path.read_bytes() for path in stored(steps)} == before


class TestUnsaved:
    def test_a_storage_that_cannot_be_written_fails_the_run_with_a_sentence(self, steps: pytest.Pytester) -> None:
        Path(".benchmarks").write_text("in the way")
        result = run(steps, "--benchmark-autosave")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stderr.fnmatch_lines(["Benchmark data is not saved: a file in */.benchmarks/* could not be written (*)"])
        result.stdout.fnmatch_lines(["*2 passed*"])
        assert "Traceback" not in result.stdout.str() + result.stderr.str()

    def test_a_json_that_cannot_be_written_does_not_lose_the_stored_run(self, steps: pytest.Pytester) -> None:
        result = run(steps, "--benchmark-autosave", "--benchmark-json=record.json/all.json")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stderr.fnmatch_lines(["Benchmark data is not saved: record.json/all.json could not be written (*)"])
        assert len(stored(steps)) == 1

    def test_a_json_that_would_take_the_place_of_a_run_ends_pytest_at_once(self, steps: pytest.Pytester) -> None:
        file = steps.path / ".benchmarks" / "kind" / "0007_run.json"
        file.parent.mkdir(parents=True)
        for base in (file, steps.path / "base.json"):
            base.write_text('{"fxbucket": 1}')
        Path("link.json").symlink_to(file)
        for option, words in (
            (".benchmarks/kind/0007_run.json", "a stored run"),
            ("link.json", "a stored run"),
            ("base.json", "the run to compare with"),
        ):
            result = steps.runpytest_inprocess("-p", "no:xdist", "--fxbucket-compare=base.json", f"--benchmark-json={option}")
            assert result.ret == pytest.ExitCode.USAGE_ERROR
            result.stderr.fnmatch_lines(
                [f"ERROR: --benchmark-json: {option} is {words}, which is never overwritten; name another file"]
            )
            assert "Traceback" not in result.stdout.str() + result.stderr.str()
            assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
        assert file.read_text() == Path("base.json").read_text() == '{"fxbucket": 1}'

    def test_a_run_that_came_to_be_there_meanwhile_is_left_alone(self, steps: pytest.Pytester) -> None:
        steps.makepyfile(
            test_x="""
            from pathlib import Path
            def test_meanwhile(benchmark):
                benchmark.extra_info["fxbucket"] = {}
                benchmark(int)
                Path(".benchmarks/0007_run.json").write_text('"fxbucket"')
            """
        )
        result = steps.runpytest_inprocess("-p", "no:xdist", "--benchmark-json=.benchmarks/0007_run.json", "test_x.py")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stderr.fnmatch_lines(["*0007_run.json could not be written (it is a stored run, which is never overwritten)"])
        assert Path(".benchmarks/0007_run.json").read_text() == '"fxbucket"'


class TestUnchanged:
    def test_what_holds_no_measurement_of_ours_is_saved_by_pytest_benchmark(self, steps: pytest.Pytester) -> None:
        steps.makepyfile(test_theirs="def test_theirs(benchmark):\n    benchmark.pedantic(int, rounds=3)\n")
        steps.makeconftest(
            """
            from pytest_benchmark.session import BenchmarkSession
            from pytest_benchmark.storage.file import FileStorage
            def pytest_sessionfinish(session):
                own = session.config._benchmarksession
                saves = own.storage.save.__code__, own.save_json.__code__
                print("THEIRS", saves == (FileStorage.save.__code__, BenchmarkSession.save_json.__code__))
            """
        )
        run(steps, "--benchmark-autosave", "-s", "test_theirs.py").stdout.fnmatch_lines(["*THEIRS True*"])
        assert len(stored(steps)) == 1

    def test_an_interrupted_run_of_others_ends_as_without_us(self, steps: pytest.Pytester) -> None:
        steps.makepyfile(test_x="def test_theirs(benchmark):\n    benchmark.pedantic(int, rounds=3)\n" + INTERRUPTED)
        ours, theirs = (run(steps, "--benchmark-autosave", *more, "test_x.py") for more in ((), ("-p", "no:fxbucket")))
        assert (ours.ret, stored(steps)) == (theirs.ret, [])

    def test_what_is_stored_is_what_pytest_benchmark_stores_and_its_comparisons_read_it(self, steps: pytest.Pytester) -> None:
        run(steps, "--benchmark-save=ours")
        run(steps, "--benchmark-save=theirs", "-p", "no:fxbucket")
        ours, theirs = stored(steps)
        assert (ours.name, theirs.name) == ("0001_ours.json", "0002_theirs.json")
        assert ours.stat().st_mode == theirs.stat().st_mode
        for mine, other in zip(entries(ours).items(), entries(theirs).items(), strict=True):
            assert mine == other
        assert ours.read_text().splitlines()[:2] == theirs.read_text().splitlines()[:2]
        theirs.unlink()
        result = run(steps, "--benchmark-compare", "--benchmark-autosave", "--benchmark-columns=median")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["test_step?bucketed? (0001_*", "test_step?bucketed? (NOW)*"])
        assert len(stored(steps)) == 2
        command = [sys.executable, "-m", "pytest_benchmark", "compare", "--columns=median", "--sort=name", "--csv=out.csv"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=steps.path)
        assert "test_step[bucketed] (0001_" in told.stdout
        assert "test_step[bucketed] (0002_" in told.stdout
        medians = [float(line.split(",")[-1]) for line in Path("out.csv").read_text().splitlines()[1:]]
        samples = sorted(s for rounds in fields()["samples"]["bucketed"] for s in rounds)
        assert medians[0] == pytest.approx((samples[89] + samples[90]) / 2)
