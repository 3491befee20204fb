"""Which files configure pytest, for commands: they name plans, and say where a plan's code and goldens begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.cli.benchmarked_plans import named_plans
from pytest_fxbucket.plan.folders import root_of

FILES = {
    "pytest.toml": '[pytest]\nfxbucket_plans = ["plans/a.toml"]\n',
    ".pytest.toml": '[pytest]\nfxbucket_plans = ["plans/a.toml"]\n',
    "pytest.ini": "[pytest]\nfxbucket_plans = plans/a.toml\n",
    "pyproject.toml": '[tool.pytest.ini_options]\nfxbucket_plans = ["plans/a.toml"]\n',
    "setup.cfg": "[tool:pytest]\nfxbucket_plans = plans/a.toml\n",
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_configures_pytest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "a.toml").touch()
    assert root_of(tmp_path / "plans" / "a.toml") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert [one.typed for one in named_plans(())] == ["plans/a.toml"]
