"""Commands of the pages: every option is one that there is, and what is shown is what is printed."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed.run as torchrun  # not within a test: pytester forgets that import, and torch cannot be imported twice

from pytest_fxbucket.cli import __main__ as cli
from suites.docs import tutorial
from suites.docs.blocks import PAGES, ROOT, Block, commands, missing, of
from suites.warm.runs import WarmRuns

EACH = [(block, command) for language in ("bash", "console") for block in of(language) for command, _ in commands(block)]
GIT = {"add"}
"""What a reader is told to do with git."""


def parse_fxbucket(words: list[str], patch: pytest.MonkeyPatch) -> bool:
    """Whether the command takes the arguments; it is not run."""
    for name in cli.COMMANDS:
        patch.setattr(import_module(f"pytest_fxbucket.cli.{name}"), "run", lambda options: 0)
    return cli.main(words) == 0


def parse_python(words: list[str], pytester: pytest.Pytester) -> bool:
    """Whether ``-m MODULE ARGUMENTS`` has a module that there is, and arguments that it takes."""
    flag, module, *rest = words
    if flag != "-m" or importlib.util.find_spec(module) is None:
        return False
    return bool(pytester.parseconfig(*rest)) if module == "pytest" else not rest


def parse_torchrun(words: list[str], pytester: pytest.Pytester) -> bool:
    """Whether torchrun takes its arguments, and what it starts those behind them."""
    options = torchrun.parse_args(words)
    return bool(options.module) and parse_python(["-m", options.training_script, *options.training_script_args], pytester)


def parse_pip(words: list[str]) -> bool:
    """Whether ``install`` names what there is, and extras of ours that there are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = re.fullmatch(r"pytest-fxbucket(?:\[(\w+)\])?|\.", words[1])
    return words[0] == "install" and found is not None and (found[1] is None or found[1] in project["optional-dependencies"])


def parse_make(words: list[str]) -> bool:
    """Whether targets and variables are in the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", text, re.MULTILINE)
    variables = re.findall(r"^([A-Z]+) \?=", text, re.MULTILINE)
    return all(word.partition("=")[0] in (variables if "=" in word else targets) for word in words)


def parses(command: str, pytester: pytest.Pytester, patch: pytest.MonkeyPatch) -> bool:
    """Whether the real parser of the command takes it; raises or says False."""
    program, *words = shlex.split(command)
    match program:
        case "fxbucket":
            return parse_fxbucket(words, patch)
        case "pytest":
            return bool(pytester.parseconfig(*words))
        case "python":
            return parse_python(words, pytester)
        case "torchrun":
            return parse_torchrun(words, pytester)
        case "make":
            return parse_make(words)
        case "pip":
            return parse_pip(words)
        case "git":
            return words[0] in GIT
    return False


def test_what_make_runs_can_be_imported() -> None:
    """Tests run few of the benchmarks: without this, one whose imports are gone shows only where somebody wants its figures."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    scripts = (path.replace("/", ".") for path in re.findall(r"python (suites/\w+/\w+)\.py", text))
    names = sorted({*re.findall(r"-m (suites\.[\w.]+)", text), *scripts})
    assert {"suites.benchmarks.main_path", "suites.benchmarks.next_iteration", "suites.soak.run"} <= set(names)
    # In a process of its own: the zoo's run puts other people's libraries on the path, for whoever comes next.
    importing = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", importing, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_commands_of_each_kind() -> None:
    assert {command.split()[0] for _, command in EACH} == {"fxbucket", "pytest", "python", "torchrun", "make", "git"}


@pytest.mark.parametrize(("block", "command"), EACH, ids=lambda one: one.where if isinstance(one, Block) else str(one))
def test_a_command_is_one_that_there_is(
    block: Block, command: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parses(command, pytester, monkeypatch), f"{block.where}: {command}"


@pytest.mark.parametrize(
    "command",
    [
        "fxbucket show --everything a.toml",
        "fxbucket tell a.toml",
        "python -m pytest_fxbucket.nowhere",
        "torchrun --nproc-per-node 2 -m suites.nowhere",
        "make everything",
        "make plans THREADS=3",
        "pip install 'pytest-fxbucket[everything]'",
        "git push",
        "ls",
    ],
)
def test_a_command_that_there_is_not_is_found(
    command: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not parses(command, pytester, monkeypatch)


def test_an_option_that_pytest_has_not_is_found(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.UsageError, match="--fxbucket-everything"):
        parses("pytest --fxbucket-plans=plans --fxbucket-everything", pytester, monkeypatch)


def test_inline_commands_of_the_pages_are_ones_that_there_are(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip install ...`` and ``make ...`` stand in sentences."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    found = set(re.findall(r"`((?:make|pip install) [^`\n]+)`", text))
    ours = {command for command in found if not command.startswith("pip") or "fxbucket" in command}
    assert len(ours) >= 5
    assert [command for command in sorted(ours) if not parses(command, pytester, monkeypatch)] == []


SHOWN = [block for block in of("console") if block.page != tutorial.PAGE]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.where)
def test_what_a_command_is_shown_to_print_is_printed(block: Block, warm_runs: WarmRuns) -> None:
    for command, shown in commands(block):
        program, *words = shlex.split(command)
        done = warm_runs.run(["-m", "pytest_fxbucket.cli", *words], ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})
        assert (program, done.returncode) == ("fxbucket", 0), done.stderr
        assert missing(done.stdout, shown) == "", f"{block.where}: {command}"


def test_the_tutorial_goes_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], warm_runs: WarmRuns
) -> None:
    """From an empty folder; ``fxbucket`` runs in this process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    monkeypatch.chdir(tmp_path)

    def run(program: str, words: list[str]) -> str:
        if program == "fxbucket":
            assert cli.main(words) == 0
            return capsys.readouterr().out
        assert program == "pytest"
        return str(warm_runs.run(["-m", "pytest", *words], tmp_path, environment).stdout)

    tutorial.follow(tmp_path, run)
