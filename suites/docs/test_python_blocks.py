"""Python and plans of the pages, run as a reader would."""

from __future__ import annotations

import os
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from pytest_fxbucket.plan import parse_plans
from pytest_fxbucket.pytest_plugin.options import TABLE
from suites.docs.blocks import BLOCKS, ROOT, TRIED, Block, missing, of
from suites.docs.project import merged, runs, write_files
from suites.warm.runs import WarmRuns

PLAIN = sorted({block.page for block in of("python") if not block.is_test and not block.file})


def name_of(block: Block) -> str:
    """A file's name for the block."""
    return f"{Path(block.page).stem}_{block.line}".replace("-", "_")


@pytest.mark.usefixtures("warm")
def test_tests_and_plans_of_the_pages_pass(pytester: pytest.Pytester) -> None:
    """All in one run, so that they share warm ranks."""
    write_files(pytester.path)
    tests = {f"test_{name_of(block)}.py": block.text for block in of("python") if block.is_test}
    plans = {f"{name_of(block)}.toml": merged(block.text) for block in of("toml") if runs(block)}
    for name, text in {**tests, **plans}.items():
        (pytester.path / name).write_text(text, encoding="utf-8")
    pytester.makeini("[pytest]\npythonpath = .\n")
    # The golden of a page's test is new there; -rP shows what tests print. What torch itself does is for other suites.
    done = pytester.runpytest_subprocess("--rootdir=.", "--fxbucket-accept=new", "-rP", "-v", "-k", "not eager", *tests, *plans)
    assert done.ret == 0, done.stdout.str()
    said = done.stdout.str()
    assert [name for name in (*tests, *plans) if f"{name}::" not in said] == []
    assert (len(tests), len(plans)) == (8, 5)
    for block in printed_by_tests():
        assert missing(said, block.text) == "", block.where


def printed_by_tests() -> list[Block]:
    """``text`` blocks that stand right behind a test."""
    return [block for before, block in pairwise(TRIED) if block.language == "text" and before.is_test]


def test_every_text_block_is_looked_at() -> None:
    goldens = [block for block in of("text") if block.text.startswith("# fxbucket golden")]
    assert [block.where for block in of("text") if block not in goldens and block not in printed_by_tests()] == []
    for block in goldens:
        plan = block.text.splitlines()[1].removeprefix("plan ").removesuffix(".toml")
        text = (ROOT / "golden" / f"{plan}.txt").read_text(encoding="utf-8")
        assert missing(text, block.text) == "", block.where


@pytest.mark.parametrize("page", PLAIN)
def test_python_of_a_page_runs_in_one_process(page: str, tmp_path: Path, warm_runs: WarmRuns) -> None:
    blocks = [block for block in of("python") if block.page == page and not block.is_test and not block.file]
    lines: list[str] = []
    for block in blocks:  # as far down as they stand on the page, so that a traceback names the page's line
        lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    script = tmp_path / "page.py"
    script.write_text("\n".join(lines), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = warm_runs.run([str(script)], tmp_path, environment)
    assert done.returncode == 0, f"{page}\n{done.stderr}"


def test_python_is_python() -> None:
    """Also where it is not run."""
    blocks = [block for block in BLOCKS if block.language == "python"]
    assert len(blocks) >= len(of("python")) > 0
    for block in blocks:
        compile(block.text, block.where, "exec")


@pytest.mark.parametrize("block", of("toml"), ids=lambda block: block.where)
def test_a_plan_loads(block: Block) -> None:
    assert parse_plans(merged(block.text), Path(block.where))


def test_ini_options_are_ours() -> None:
    assert of("ini")
    for block in of("ini"):
        named = [line.partition("=")[0].strip() for line in block.text.splitlines() if "=" in line]
        assert named, block.where
        assert set(named) <= {row.dest for row in TABLE}, block.where


def test_a_fragment_takes_the_place_of_keys_and_leaves_the_others() -> None:
    plan = tomllib.loads(merged("[parallel]\nparam_dtype = 'bfloat16'\n[[optimizer]]\nfactory = 'torch.optim:SGD'\n"))
    assert plan["parallel"] == {"dp_shard": 4, "param_dtype": "bfloat16"}
    assert [one["factory"] for one in plan["optimizer"]] == ["torch.optim:SGD"]
    assert tomllib.loads(merged("[model]\nfactory = 'a:b'\n")) == {"model": {"factory": "a:b"}}
    assert {*tomllib.loads(merged("[graph]\nfactory = 'a:b'\n"))} == {"graph", "parallel", "bucket", "checks", "run"}
