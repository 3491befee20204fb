"""README's examples are tests, its table of the plan file is the schema's, and its options are all there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from pytest_fxbucket.options import TABLE
from pytest_fxbucket.plan.schema import Benchmark, Key, Ring, keys
from suites.plans.plan_reference import END, reference, replaced

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_example_tests_of_readme_pass(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    # What asserts a step time is for other machines than the one that happens to run this.
    first, graph_view = (block for block in blocks if "fxbucket_plan" in block and "fxbucket_benchmark" not in block)
    assert len([line for line in first.splitlines() if line.strip()]) <= 10
    root = request.config.rootpath
    for name in ("fixtures", "golden"):
        (pytester.path / name).symlink_to(root / name)
    pytester.makepyfile(first, test_graph_view=graph_view)
    pytester.makeini("[pytest]\npythonpath = .\n")
    pytester.runpytest_subprocess("--rootdir", str(pytester.path)).assert_outcomes(passed=2)


def block_with(text: str) -> str:
    """The one Python example of README that has ``text`` in it."""
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if text in block)
    return str(found)


def test_the_example_of_a_captured_step_runs() -> None:
    exec(compile(block_with("capture_step(train"), "README.md", "exec"), {})


def test_the_example_of_a_mode_is_one_that_keeps_its_plan(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> None:
    root = request.config.rootpath
    (pytester.path / "fixtures").symlink_to(root / "fixtures")
    pytester.makepyfile(mytrainer=block_with("class Summed"))
    plan = (root / "fixtures" / "plans" / "llama_tied.toml").read_text(encoding="utf-8")
    mode = 'mode = "mytrainer:summed"\n'
    pytester.makefile(".toml", summed=re.sub(r"mode = .*\n", "", plan).replace("[parallel]\n", f"[parallel]\n{mode}"))
    command = ("--rootdir", str(pytester.path), "--fxbucket-plans=summed.toml", "-k", "not golden")
    pytester.runpytest_subprocess(*command).assert_outcomes(passed=4, skipped=1, deselected=1)


def test_the_table_of_the_plan_file_is_what_the_schema_says() -> None:
    assert replaced(README) == README, "README's table is not the schema's: make reference, and review the diff"


def test_every_key_has_one_row_and_no_cell_is_empty() -> None:
    rows = [row.strip("| ").split(" | ") for row in reference().splitlines()[2:]]
    names = [name for key in keys() for name in (f"{key.table}.{key.key}", *_within(key))]
    assert [row[0] for row in rows] == [f"`{name}`" for name in names]
    assert [row for row in rows if len(row) != 4 or not all(cell.strip() for cell in row)] == []


def _within(key: Key) -> list[str]:
    """Keys of the table that the key's value may be."""
    options = {("run", "ring"): Ring, ("checks", "benchmark"): Benchmark}.get((key.table, key.key))
    return [f"{key.table}.{key.key}.{spec.name}" for spec in dataclasses.fields(options)] if options is not None else []


def test_a_readme_without_the_marks_of_the_table_is_not_written_to() -> None:
    with pytest.raises(ValueError, match="README has no table between"):
        replaced(README.replace(END, ""))


def test_every_option_is_in_readme() -> None:
    assert [row.flag for row in TABLE if row.metavar and row.flag not in README] == []
    assert [row.dest for row in TABLE if f"`{row.dest}`" not in README] == []
