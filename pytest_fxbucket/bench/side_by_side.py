"""Times two sides, each a process in the tree of a commit: their ranks take turns on this machine, in several sets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from pytest_fxbucket.bench.side import PROTOCOL
from pytest_fxbucket.bench.sides_in_turn import TurnServer
from pytest_fxbucket.bench.stats import WINDOW, Pacing, Series, has_settled, is_warm
from pytest_fxbucket.errors import BenchmarkError

OLD, NEW = SIDES = ("old", "new")
_TURN_S = 0.08  # what the timed steps of a turn are to take together
_MOST_STEPS = 4
_OTHER = "the pytest_fxbucket there cannot time steps beside another commit's"


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long two sides are run."""

    budget_s: float
    """Seconds for the steps of both sides, warm-up included."""
    sets: int = 12
    least_sets: int = 5
    """How many sets there are at least before the run may end early."""
    least_rounds: int = 10
    """How many rounds a set has at least, even if they take longer than its share of the budget."""


def run(
    sides: tuple[SideProcess, SideProcess],
    length: RunLength,
    is_enough: Callable[[Series], bool],
    say: Callable[[str], None] = lambda _: None,
) -> Series:
    """Run the variants ``old`` and ``new`` until all sets are done, or ``is_enough`` says so after one of them.

    Both sides must have answered their first request. Raises BenchmarkError, with the side's own message, if one fails.
    """
    series = Series()
    for number in range(1, length.sets + 1):
        say(f"set {number} of at most {length.sets}")
        _add_set(series, sides, length)
        if number >= length.least_sets and is_enough(series):
            break
    return series


def _add_set(series: Series, sides: tuple[SideProcess, SideProcess], length: RunLength) -> None:
    """Add one set to ``series``: start fresh ranks of both sides, warm them up, time them and end them."""
    budget_s = length.budget_s / length.sets
    watched = [side.descriptor for side in sides]

    def on_other(descriptor: int) -> None:
        side = next(side for side in sides if side.descriptor == descriptor)
        side.answer()  # raises, since none is due before its turns are over
        raise BenchmarkError(f"{side.label}: it ended its turns by itself")

    with ExitStack() as stack:
        servers = {name: stack.enter_context(TurnServer(watched, on_other)) for name in SIDES}
        # Both are asked before one is waited for, so that the ranks of both start at the same time.
        for side, server in zip(sides, servers.values(), strict=True):
            side.ask({"address": server.address, "budget_s": budget_s})
        for server in servers.values():
            server.accept()
        samples, warm = _rounds(servers, Pacing(budget_s, 0.0), length.least_rounds)
    # Only behind the block, whose end tells both sides that their turns are over: no answer comes before.
    answers = {name: side.answer() for name, side in zip(SIDES, sides, strict=True)}
    has_priority = all(answer["has_priority"] for answer in answers.values())
    peaks = {name: answer["peak_bytes"] for name, answer in answers.items()}
    series.add_set(samples, len(warm[OLD]), has_settled(warm), has_priority, peaks)


Rounds = dict[str, list[float]]
"""By side the seconds of its rounds."""


def _rounds(servers: Mapping[str, TurnServer], pacing: Pacing, least_rounds: int) -> tuple[Rounds, Rounds]:
    """(samples, the warm-up before them), until the time is over; the side that begins changes from round to round.

    A sample is the fastest of a few steps of a turn, since other work on the machine only ever makes a step slower (Chen &
    Revels, Robust benchmarking in noisy environments, arXiv 1608.04295).
    """
    begin, orders = time.monotonic(), cycle((SIDES, SIDES[::-1]))
    warm, samples = ({name: list[float]() for name in SIDES} for _ in range(2))

    def add_one(rounds: Rounds, steps: int) -> None:
        for name in next(orders):
            rounds[name].append(min(servers[name].turn(steps)))

    while not is_warm(warm, time.monotonic() - begin, pacing):
        add_one(warm, 1)
    # The same number for both sides, so that none has more tries for its fastest step. A turn stays short, so that the machine
    # is the same for both turns of a round.
    step_s = median(sample for rounds in warm.values() for sample in rounds[-WINDOW:])
    steps = max(1, min(_MOST_STEPS, round(_TURN_S / step_s)))
    while len(samples[OLD]) < least_rounds or time.monotonic() - begin < pacing.budget_s:
        add_one(samples, steps)
    return samples, warm


@dataclass(frozen=True, slots=True)
class SideStart:
    """How the process of a side is started."""

    label: str
    """The side's name in errors."""
    python: str
    cwd: Path
    environment: Mapping[str, str]
    request: Mapping[str, Any]
    """The first request, which names the plan."""


class SideProcess:
    """The running process of a side; a context. All errors are BenchmarkErrors of one sentence that begins with its label.

    It has a session of its own, so that Ctrl-C does not reach it and this process decides its end. The kernel kills it, its
    server and its ranks when this process ends, however that happens.
    """

    def __init__(self, start: SideStart) -> None:
        self.label, self._python = start.label, start.python
        ours, theirs = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [start.python, "-P", "-m", "pytest_fxbucket.bench.side", str(theirs), str(os.getpid())],
                cwd=start.cwd,
                env=start.environment,
                stdin=subprocess.PIPE,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs],
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            os.close(ours)
            self._errors.close()
            raise BenchmarkError(f"{start.label}: {start.python} cannot be started: {error.strerror or error}") from None
        finally:
            os.close(theirs)  # else the end of the answers could not be seen
        self._answers = open(ours, encoding="utf-8")  # noqa: SIM115 - closed with the process
        self.ask({"protocol": PROTOCOL, **start.request})

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """File descriptor that can be read when there is an answer, or when the process has closed it and none will come."""
        return self._answers.fileno()

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request. If the process has gone, it is :meth:`answer` that raises."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def answer(self) -> Mapping[str, Any]:
        """Wait for the answer. Raises BenchmarkError if it is an error, or if the process ended without one."""
        line = self._answers.readline()
        if not line.endswith("\n"):  # it was killed, perhaps in the middle of an answer
            raise BenchmarkError(f"{self.label}: {self._why_gone()}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("protocol") != PROTOCOL:
            raise BenchmarkError(f"{self.label}: {_OTHER}: it takes turns by protocol {answer.get('protocol')}, not {PROTOCOL}")
        if "error" in answer:
            raise BenchmarkError(f"{self.label}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Kill it at once, whatever it is doing; its ranks die with it."""
        self._process.kill()
        self._process.wait()
        # Closing flushes what an earlier request could not write.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        self._answers.close()
        self._errors.close()

    def _why_gone(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        # A commit from before there was this module.
        if "pytest_fxbucket.bench" in last and "No module named" in last:
            return _OTHER
        if "No module named" in last and self._python != sys.executable:
            return f"{self._python} cannot be used: {last}"
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"its process ended {ended}" + (f": {last}" if last else "")
