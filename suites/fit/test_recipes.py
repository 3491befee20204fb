"""What the repository has for other people's CI: every file is read as its program reads it, and its own steps are run."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from functools import update_wrapper
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_fxbucket.golden.store import parse, render
from suites.fit.project import plan_of, write
from suites.warm.runs import WarmRuns

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "howto" / "recipes"
PLAN = plan_of("net", "collectives", "same", "bitwise", "eager").replace('"embed", "layers.0"', '"embed+layers.0"')
OTHER = PLAN.replace('"embed+layers.0"', '"embed", "layers.0"')
"""The plan of a second commit, and of a first."""
IN_A_RUN = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "CI": "true", "COLUMNS": "160"}
"""What is installed is what is there: pip says what it would do."""
COMMAND = "python -m pytest --fxbucket-plans=plans -v"
"""What tox and nox run, and the project's fixture with it."""
PACKAGES = "expecttest"
"""Instead of what is in no index yet."""


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def variables(**more: str) -> dict[str, str]:
    """An environment whose commands are those of this one's; no variable of a test runner's."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**found, "PYTHONPATH": str(ROOT), **IN_A_RUN, **more}


def bash(script: str, folder: Path, **more: str) -> str:
    """What a script prints that ends well, as a runner starts it."""
    ran = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env=variables(**more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{script}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, warm_runs: WarmRuns) -> Path:
    """A repository of a user's with a plan and its golden, in which a second commit changes both; checked as tox and nox do."""
    folder = tmp_path_factory.mktemp("project")
    write(folder, plans__net=PLAN)
    done = warm_runs.run([*COMMAND.split()[1:], "--fxbucket-accept=all"], folder, variables())
    assert "plans/net.toml::golden PASSED" in done.stdout, done.stdout + done.stderr
    golden = folder / "golden" / "plans" / "net.txt"
    accepted = golden.read_text(encoding="utf-8")
    git(folder, "init", "--quiet")
    for plan, text in ((OTHER, other(accepted)), (PLAN, accepted)):
        write(folder, plans__net=plan)
        golden.write_text(text, encoding="utf-8")
        git(folder, "add", "plans", "golden", "mytrainer", "pytest.ini")
        git(folder, "commit", "--quiet", "-m", "a plan")
    return folder


def other(golden: str) -> str:
    """As if it was accepted from another plan."""
    return render(parse(golden, "net").replace("embed+layers.0", "embed"))


def expressions(text: str, inputs: Mapping[str, str]) -> str:
    """``text`` with each ``${{ inputs.NAME }}`` in its place; fails for any other expression."""
    return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: inputs[found[1]], text)


def test_the_github_action_runs_each_of_its_steps(project: Path, tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    given = {"packages": PACKAGES, "base": "HEAD~1", "arguments": "-v"}
    inputs = {name: given.get(name, str(one["default"])) for name, one in action["inputs"].items()}
    said = {}
    for step in action["runs"]["steps"]:
        if "run" not in step or (inputs["timed"] == "" and "inputs.timed != ''" in step.get("if", "")):
            continue
        assert "${{" not in step["run"]  # what is given is data, not a part of the script
        own = {name: expressions(value, inputs) for name, value in step["env"].items()}
        assert "${{" not in "".join(own.values())
        own = {name: value for name, value in own.items() if value}
        said[step["name"]] = bash(step["run"], project, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), **own)
    assert [*said] == ["install", "plans", "comment on goldens"]
    assert "plans/net.toml::golden PASSED" in said["plans"]
    comment = (project / "fxbucket-comment.md").read_text(encoding="utf-8")
    assert comment == (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert comment.startswith("1 golden of 1 changed.\n\n**golden/plans/net.txt**\n")
    assert re.search(r"^\+.*embed\+layers\.0", comment, re.MULTILINE)
    uploaded = next(step for step in action["runs"]["steps"] if "upload-artifact" in step.get("uses", ""))["with"]["path"]
    assert {"fxbucket.xml", "fxbucket-comment.md"} <= {path for path in uploaded.split() if (project / path).exists()}


def test_the_workflow_gives_the_action_inputs_that_it_has() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (job,) = yaml.safe_load((RECIPES / "github.yml").read_text(encoding="utf-8"))["jobs"].values()
    (step,) = (step for step in job["steps"] if "pytest-fxbucket" in step.get("uses", ""))
    assert set(step["with"]) <= set(action["inputs"])
    assert set(re.findall(r"matrix\.(\w+)", str(step))) <= set(job["strategy"]["matrix"])


def test_the_gitlab_job_runs_its_script(project: Path) -> None:
    job = yaml.safe_load((ROOT / "templates" / "fxbucket.yml").read_text(encoding="utf-8"))[".fxbucket"]
    (torches,) = job["parallel"]["matrix"]
    given = {"PACKAGES": PACKAGES, "ARGUMENTS": "-v", "BASE": "HEAD", "TORCH": torches["TORCH"][-1]}
    own = {name: value for name, value in (job["variables"] | given).items() if "$" not in value}
    said = [bash(line, project, **own) for line in (*job["script"], *job["after_script"])]
    assert "plans/net.toml::golden PASSED" in said[1]
    assert (project / "fxbucket-comment.md").read_text(encoding="utf-8") == "Goldens are as before.\n"
    assert (project / job["artifacts"]["reports"]["junit"]).exists()
    user = yaml.safe_load((RECIPES / "gitlab.yml").read_text(encoding="utf-8"))["plans"]
    assert user["extends"] == ".fxbucket"
    assert set(user["variables"]) <= set(job["variables"])


def test_the_pre_commit_hook_is_red_for_a_golden_that_is_not_current(project: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (repo,) = yaml.safe_load((RECIPES / "pre-commit.yaml").read_text(encoding="utf-8"))["repos"]
    assert [one["id"] for one in repo["hooks"]] == [hook["id"]]
    golden = project / "golden" / "plans" / "net.txt"
    text = golden.read_text(encoding="utf-8")
    golden.write_text(other(text), encoding="utf-8")
    try:
        said = bash(f"! {' '.join([hook['entry'], *hook['args']])}", project)
        assert "1 failed, 1 deselected" in said  # audit is green, and is not asked
        assert "golden/plans/net.txt" in said
    finally:
        golden.write_text(text, encoding="utf-8")


def test_the_pre_commit_hook_is_red_for_a_plan_that_cannot_be_read(project: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    merging = project / "plans" / "merging.toml"
    merging.write_text(f"<<<<<<< HEAD\n{PLAN}=======\n{OTHER}>>>>>>> theirs\n", encoding="utf-8")
    try:
        said = bash(f"! {' '.join([hook['entry'], *hook['args']])}", project)
    finally:
        merging.unlink()
    assert "plans/merging.toml:1: this is not TOML" in said
    assert "1 failed, 1 passed, 1 deselected" in said


def test_tox_runs_the_plans() -> None:
    ini = configparser.ConfigParser()
    ini.read(RECIPES / "tox.ini", encoding="utf-8")
    section = ini[f"testenv:{ini['tox']['env_list']}"]
    deps = [line.rpartition(": ")[2] for line in section["deps"].split("\n") if line]
    assert deps == ["pytest-fxbucket", "torch==2.12.1", "torch==2.13.0"]
    assert section["commands"].replace("{posargs}", "-v") == COMMAND


def test_nox_runs_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a session that stands for nox's own, which would make an environment: it says what is installed, and what is run."""
    installed, said, sessions = list[str](), list[str](), dict[str, Any]()

    class Session:
        posargs = ("-v",)

        def install(self, *packages: str) -> None:
            installed.extend(packages)

        def run(self, *words: str) -> None:
            said.append(" ".join(words))

    stand_in: Any = types.ModuleType("nox")
    stand_in.session = lambda function: sessions.setdefault(function.__name__, function)
    stand_in.parametrize = lambda name, values: (
        lambda function: update_wrapper(lambda session: function(session, **{name: values[-1]}), function)
    )
    monkeypatch.setitem(sys.modules, "nox", stand_in)
    runpy.run_path(str(RECIPES / "noxfile.py"))
    sessions["plans"](Session())
    assert installed[0] == "torch==2.13.0"
    assert said == [COMMAND]


def tags() -> Iterator[str]:
    """Versions of torch that the recipes name."""
    for path in (*RECIPES.iterdir(), ROOT / "templates" / "fxbucket.yml", ROOT / "action.yml"):
        yield from re.findall(r"\b2\.\d\d\.\d\b", path.read_text(encoding="utf-8"))


def test_every_torch_of_the_recipes_is_one_that_plans_are_tested_with() -> None:
    figures = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert {tag for tag in tags() if f"| {tag} |" not in figures} == set()
