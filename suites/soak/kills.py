"""The part of the soak that kills runs while they accept goldens: nothing is lost or halved, and the next run ends the job."""

from __future__ import annotations

import functools
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.golden.store import parse, render

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = 40
MISSING = 8
"""of them, before they are first accepted"""
_LIMIT_S = 120
# Tells the parent when writing begins and ends.
_CONFTEST = """
import os
import pytest

TELL = int(os.environ["SOAK_TELL"])

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish():
    os.write(TELL, b"b")
    yield
    os.write(TELL, b"e")
"""
_TEST = """
from pytest_fxbucket.golden.store import render
from pytest_fxbucket.pytest_plugin.session import fx_session
from suites.soak.kills import GOLDENS, body

def test_goldens(request):
    fx = fx_session(request.config)
    for number in range(GOLDENS):
        fx.accepted.add(fx.options.golden_dir / f"{number}.txt", render(body(number, "new")))
"""


@functools.cache
def body(number: int, name: str) -> str:
    """The body of golden `number` in its `name` version: longer than those of plans, so that a kill can come amid one."""
    return "".join(f"{name} golden {number}, line {line}: launch all_gather layers.{line}\n" for line in range(2000 + number))


def kills(count: int, seed: int, say: Callable[[str], None]) -> Iterator[str]:
    """`count` runs killed at moments that `seed` gives, from when the first golden is about to be written till the last is."""
    chance = random.Random(seed)
    well = amid = 0
    with tempfile.TemporaryDirectory() as name:
        project = _Project(Path(name))
        project.reset()
        length_s = project.accept()
        for number in range(1, count + 1):
            project.reset()
            delay_s = chance.uniform(0, 1.2 * length_s)
            project.accept(kill_after_s=delay_s)
            state = project.state()
            problems = list(state.problems)
            amid += 0 < state.new < GOLDENS or bool(state.litter)
            length_s = max(0.001, (length_s + project.accept()) / 2)
            after = project.state()
            problems += after.problems
            if after.new != GOLDENS or after.litter:
                problems.append(f"the next run left {GOLDENS - after.new} goldens as they were, and {after.litter} beside them")
            well += not problems
            yield from (f"kill {number} after {1e3 * delay_s:.1f} ms: {problem}" for problem in problems)
    say(
        f"kills: {well} of {count} lost and halved none of {GOLDENS} goldens; {amid} of them came amid the writing; seed {seed}"
    )
    if count >= 20 and not amid:
        yield f"none of {count} kills came amid the writing, so that they show nothing"


@dataclass(frozen=True, slots=True)
class _State:
    """What lies in the golden folder."""

    new: int
    """goldens that hold the accepted text"""
    litter: list[str]
    problems: list[str]


class _Project:
    def __init__(self, folder: Path) -> None:
        self.folder, self.goldens = folder, folder / "golden"
        self.goldens.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "conftest.py").write_text(_CONFTEST)
        (folder / "test_goldens.py").write_text(_TEST)

    def reset(self) -> None:
        """Have the old goldens again, and no more."""
        for path in self.goldens.iterdir():
            path.unlink()
        for number in range(MISSING, GOLDENS):
            (self.goldens / f"{number}.txt").write_text(render(body(number, "old")))

    def accept(self, kill_after_s: float | None = None) -> float:
        """Run pytest until its end, or kill it that long after it began to write; return for how long it wrote."""
        told, tell = os.pipe()
        env = {**os.environ, "SOAK_TELL": str(tell), "PYTHONPATH": str(ROOT)}
        env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_fxbucket.pytest_plugin.plugin", "-p", "no:cacheprovider"]
        command.append("--fxbucket-accept=all")
        with subprocess.Popen(command, cwd=self.folder, env=env, pass_fds=[tell], stdout=subprocess.PIPE, text=True) as run:
            os.close(tell)
            try:
                self._await(told, b"b", _LIMIT_S)
                begin = time.monotonic()
                self._await(told, b"e", _LIMIT_S if kill_after_s is None else kill_after_s)
                length_s = time.monotonic() - begin
                if kill_after_s is not None:
                    run.send_signal(signal.SIGKILL)
                output = run.communicate(timeout=_LIMIT_S)[0]
            finally:
                run.kill()
                os.close(told)
        if kill_after_s is None and run.returncode:
            raise AssertionError(f"a run that was not killed ended with {run.returncode}:\n{output}")
        return length_s

    def _await(self, told: int, what: bytes, limit_s: float) -> None:
        """Wait until the run tells `what`, for `limit_s` at most."""
        if select.select([told], [], [], limit_s)[0]:
            assert os.read(told, 1) == what, "the run ended before it wrote"

    def state(self) -> _State:
        names = {path.name for path in self.goldens.iterdir()}
        expected = [f"{number}.txt" for number in range(GOLDENS)]
        new, problems = 0, []
        for number, name in enumerate(expected):
            if name not in names:
                problems += [f"{name} is lost"] if number >= MISSING else []
                continue
            try:
                found = parse((self.goldens / name).read_text(), name)
            except GoldenError as error:
                problems.append(str(error))
                continue
            new += found == body(number, "new")
            if found not in (body(number, "new"), body(number, "old")):
                problems.append(f"{name} is neither the old nor the new one")
        return _State(new, sorted(names - set(expected)), problems)
