"""Projects with goldens: of small plans of which golden is the only check, and of tests that need no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pytest_fxbucket.golden.store import render

MODEL = Path(__file__).parents[2] / "fixtures" / "models" / "traced.py"
PLAN = """
[graph]
factory = "traced:step"

[parallel]
dp_shard = 2

[bucket]
plan = ["layers.[0-2]"]

[checks]
audit = false
collectives = false
bitwise = false
same = false
eager = false
"""
INI = "[pytest]\naddopts = -p no:cacheprovider\n"
# What tests of accepting ask for: text needs no torch.
CONFTEST = """
import pytest

@pytest.fixture
def golden(fxbucket_golden):
    def compare(name, text):
        __tracebackhide__ = True
        assert text == fxbucket_golden(name)

    return compare
"""
PLANS = "--fxbucket-plans=plans"


def make_project(pytester: pytest.Pytester, *names: str) -> Path:
    """Write plans/NAME.toml for each name, and the model; return the folder in which their goldens will lie."""
    shutil.copy(MODEL, pytester.path / "traced.py")
    pytester.makeini(INI)
    for name in names:
        write_plan(pytester, name)
    return pytester.path / "golden" / "plans"


def write_plan(pytester: pytest.Pytester, name: str, more: str = "") -> Path:
    path = pytester.path / "plans" / f"{name}.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLAN + more)
    return path


def files(folder: Path) -> dict[str, bytes]:
    """Return all files below `folder` with what they hold, temporary ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def make_tests(pytester: pytest.Pytester, **sources: str) -> Path:
    """Write test files that may use `golden(name, text)`; return the golden folder."""
    pytester.makeini(INI)
    (pytester.path / "conftest.py").write_text(CONFTEST)
    pytester.makepyfile(**sources)
    return pytester.path / "golden"


def put(folder: Path, **texts: str) -> None:
    """Write goldens with these bodies below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(render(text))
