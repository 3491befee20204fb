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
"""
# Hypothesis would import itself anew at the end of each run within a run.
INI = "[pytest]\naddopts = -p no:cacheprovider -p no:hypothesispytest\n"
# A golden of a test's own, compared and accepted as a plan's is.
CONFTEST = """
import pytest
from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.golden.accept import accepts
from pytest_fxbucket.golden.store import GoldenStore, render
from pytest_fxbucket.options import fx_session

@pytest.fixture
def golden(request):
    fx = fx_session(request.config)
    store = GoldenStore(fx.options.golden_dir, fx.options.rootdir)
    folder = store.root / request.path.relative_to(store.rootdir).with_suffix("")

    def compare(name, text):
        path = folder / f"{name}.txt"
        fx.compared.append(path)
        may_write = accepts(fx.options.accept, path)
        try:
            accepted = store.read(path)
        except GoldenError:
            if not may_write:
                raise
            accepted = None
        if accepted != text:
            assert may_write, f"{name} changed"
            fx.accepted.add(path, render(text))

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
