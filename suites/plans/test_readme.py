"""README's examples are tests, and its tables name every key and option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fxbucket.options import TABLE
from pytest_fxbucket.plan.schema import keys

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_example_tests_of_readme_pass(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> None:
    first, graph_view = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "fxbucket_plan" in block)
    assert len([line for line in first.splitlines() if line.strip()]) <= 10
    root = request.config.rootpath
    for name in ("fixtures", "golden"):
        (pytester.path / name).symlink_to(root / name)
    pytester.makepyfile(first, test_graph_view=graph_view)
    pytester.makeini("[pytest]\npythonpath = .\n")
    pytester.runpytest_subprocess("--rootdir", str(pytester.path)).assert_outcomes(passed=2)


def test_every_key_of_the_schema_is_in_readme() -> None:
    table = README[README.index("| key | default |") : README.index("*Graphs of your own.*")]
    # [optimizer] is refused as a whole
    missing = [
        f"{key.table}.{key.key}"
        for key in keys()
        if key.table != "optimizer" and not re.search(rf"`{key.table}\.[^|]*\b{key.key}`|`{key.table}\.{key.key}`", table)
    ]
    assert missing == []


def test_every_option_is_in_readme() -> None:
    assert [row.flag for row in TABLE if row.metavar and row.flag not in README] == []
    assert [row.dest for row in TABLE if f"`{row.dest}`" not in README] == []
