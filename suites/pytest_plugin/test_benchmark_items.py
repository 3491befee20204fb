"""Step time as items, from the command line: samples in pytest-benchmark, named skips, and verdicts on stored runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from suites.warm.runs import WarmRuns

pytestmark = pytest.mark.usefixtures("warm")

ONLY = "\n[checks]\naudit = false\ngolden = false\ncollectives = false\nsame = false\nbitwise = false\neager = false\n"
TIMED = ONLY + "benchmark = { budget_s = 0.1 }\n"
AGAINST = ONLY + 'benchmark = { budget_s = 0.1, against = ["torch"] }\n'


@pytest.fixture
def timed(project: pytest.Pytester) -> pytest.Pytester:
    """The project with plans/timed.toml alone, which is benchmarked."""
    plans = project.path / "plans"
    (plans / "timed.toml").write_text((plans / "plain.toml").read_text() + TIMED)
    for name in ("good", "plain", "broken"):
        (plans / f"{name}.toml").unlink()
    return project


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_subprocess("--fxbucket-plans=plans", "-v", "-rs", *arguments)


def stored(project: pytest.Pytester) -> list[Path]:
    return sorted(project.path.glob(".benchmarks/*/*.json"))


def entries(file: Path) -> dict[str, dict[str, Any]]:
    return {entry["fullname"]: entry for entry in json.loads(file.read_text())["benchmarks"]}


def test_each_variant_is_an_entry_of_pytest_benchmark_with_the_samples_of_the_slowest_rank_and_has_its_page(
    timed: pytest.Pytester, warm_runs: WarmRuns
) -> None:
    pytest.importorskip("plotly", reason="a report needs plotly")
    plan = timed.path / "plans" / "timed.toml"
    plan.write_text(plan.read_text().replace(TIMED, AGAINST))
    result = run(timed, "--benchmark-json=out.json", "--benchmark-columns=rounds", "--fxbucket-report=pages")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["plans/timed.toml: * benchmark passed, *", "*benchmark 'plans/timed.toml': 3 tests*"])
    found = entries(timed.path / "out.json")
    assert sorted(found) == [f"plans/timed.toml::benchmark{variant}" for variant in ("", ":torch", ":unbucketed")]
    record = found["plans/timed.toml::benchmark"]["extra_info"]["fxbucket"]
    assert sorted(record["graphs"]) == sorted(record["samples"]) == ["bucketed", "torch", "unbucketed"]
    for name, entry in found.items():
        variant = name.rpartition(":")[2].replace("benchmark", "bucketed")
        samples = [sample for rounds in record["samples"][variant] for sample in rounds]
        assert entry["stats"]["data"] == pytest.approx(samples, rel=1e-9)
        assert entry["group"] == "plans/timed.toml"
        assert entry["options"]["timer"].endswith("slowest_rank")
    assert (record["plan"], record["ranks"], record["backend"], record["pass"]) == ("plans/timed.toml", 2, "gloo", "manual")
    assert record["workload"]["world"]["dp_shard"] == 2
    assert record["capture_s"] > 0
    assert record["pass_s"] > 0
    result.stdout.fnmatch_lines(["report of 1 plan: pages/index.html"])
    traces = {f"plans.timed.{variant}.trace.json" for variant in ("bucketed", "torch", "unbucketed")}
    assert {path.name for path in (timed.path / "pages").iterdir()} == {"index.html", "plans.timed.html", *traces}
    asked = ("simulate", "plans/timed.toml", "--cluster=cpu-gloo", "--calibrate=pages/plans.timed.bucketed.trace.json")
    told = warm_runs.run(["-m", "pytest_fxbucket.cli", *asked], timed.path, os.environ).stdout
    lines = ["*on cpu-gloo as in plans.timed.bucketed.trace.json*", "error left: compute *launches *"]
    pytest.LineMatcher(told.splitlines()).fnmatch_lines(lines)


def test_a_stored_run_is_compared_and_a_regression_is_a_failed_item_with_numbers(timed: pytest.Pytester) -> None:
    empty = run(timed, "--fxbucket-compare=latest", "--benchmark-autosave")
    empty.assert_outcomes(passed=1, skipped=1)
    empty.stdout.fnmatch_lines(["*benchmark: there is no stored run of plans/timed.toml in .benchmarks; to store one, run *"])
    (file,) = stored(timed)
    before = file.read_bytes()
    data = json.loads(before)
    of_plan = next(entry for entry in data["benchmarks"] if entry["fullname"].endswith("::benchmark"))
    samples = of_plan["extra_info"]["fxbucket"]["samples"]
    samples["bucketed"] = [[second / 50 for second in rounds] for rounds in samples["bucketed"]]
    file.write_text(json.dumps(data))
    slower = run(timed, "--fxbucket-compare=latest", "--benchmark-autosave")
    slower.assert_outcomes(passed=1, failed=1)
    slower.stdout.fnmatch_lines(
        ["*plans/timed.toml: benchmark*", "slower against unbucketed than before, outside the noise: +*%*", "*threshold +3.0%"]
    )
    assert "Traceback" not in slower.stdout.str()
    assert len(stored(timed)) == 2
    assert json.loads(file.read_text()) == data
    pytest.importorskip("plotly", reason="a report needs plotly")
    file.with_name("9999_none.json").mkdir()
    torn = run(timed, "--fxbucket-compare=latest", "--fxbucket-report=pages")
    torn.assert_outcomes(passed=1, failed=1)
    torn.stdout.fnmatch_lines(["*9999_none.json cannot be read, as it is no file; *", "report of 1 plan: pages/index.html"])


def test_where_no_samples_are_taken_the_items_are_skipped_and_say_why(timed: pytest.Pytester) -> None:
    pytest.importorskip("xdist", reason="-n needs pytest-xdist")
    for arguments, reason in (
        (("-n1",), "benchmark: pytest-benchmark takes no samples in workers of pytest-xdist; run it with -n 0"),
        (("--benchmark-disable",), "benchmark: pytest-benchmark takes no samples with --benchmark-disable"),
        (("-p", "no:benchmark"), "benchmark: pytest-benchmark is not there, which keeps the samples; pip install *"),
        (("--fxbucket-backend=local",), "benchmark: back end local runs all ranks in one process, *"),
    ):
        result = run(timed, *arguments)
        result.assert_outcomes(skipped=2)
        result.stdout.fnmatch_lines([f"SKIPPED*{reason}"])


def test_a_test_measures_the_plan_that_it_is_marked_with(timed: pytest.Pytester) -> None:
    timed.makepyfile(
        """
        import pytest

        @pytest.mark.fxbucket_plan("plans/timed.toml")
        def test_speed(fxbucket_benchmark):
            time = fxbucket_benchmark(against=[])
            assert set(time.record.samples) == {"bucketed", "unbucketed"}
            assert len(time.samples("bucketed")) == len(time.samples("unbucketed")) >= 32
            assert time.ratio().low <= time.ratio().log_ratio <= time.ratio().high

        @pytest.mark.fxbucket_plan("plans/timed.toml")
        def test_wrong(fxbucket_benchmark):
            fxbucket_benchmark(budget=1)

        def test_other():
            pass
        """
    )
    result = timed.runpytest_subprocess("-v", "--benchmark-only", "--benchmark-json=out.json", "-rs")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(['E *PlanError: fxbucket_benchmark has no argument "budget"; did you mean "budget_s"[?]'])
    (entry,) = entries(timed.path / "out.json").values()
    assert entry["name"] == "test_speed"
    assert entry["extra_info"]["fxbucket"]["plan"] == "plans/timed.toml"
