"""The process of one side, as whoever compares two of them has it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_fxbucket.bench.side import PROTOCOL
from pytest_fxbucket.errors import BenchmarkError

_OTHER = "the pytest_fxbucket there cannot time steps beside another commit's"


@dataclass(frozen=True, slots=True)
class Start:
    """How a side is started."""

    label: str
    """What to call it in errors."""
    python: str
    cwd: Path
    environment: Mapping[str, str]
    request: Mapping[str, Any]
    """The first."""


class SideProcess:
    """A side that runs; a context. All errors are BenchmarkErrors of one sentence that begins with its label.

    It has a session of its own, so that Ctrl-C leaves it to us, and the kernel kills it, its server and its ranks when this
    process ends, however it ends.
    """

    def __init__(self, start: Start) -> None:
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
            os.close(theirs)
        self._answers = open(ours, encoding="utf-8")  # noqa: SIM115 - closed with the process
        self.ask({"protocol": PROTOCOL, **start.request})

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """Can be read when there is an answer, or none will come any more."""
        return self._answers.fileno()

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request; if nobody is there to read it, the answer says so."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def answer(self) -> Mapping[str, Any]:
        """Wait for the answer. Raises BenchmarkError if it is a sentence, or if there is none."""
        line = self._answers.readline()
        if not line.endswith("\n"):
            raise BenchmarkError(f"{self.label}: {self._why_gone()}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("protocol") != PROTOCOL:
            raise BenchmarkError(f"{self.label}: {_OTHER}: it takes turns by protocol {answer.get('protocol')}, not {PROTOCOL}")
        if "error" in answer:
            raise BenchmarkError(f"{self.label}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it at once, in the middle of whatever it does: nothing that it has outlives it."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        self._answers.close()
        self._errors.close()

    def _why_gone(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        if "pytest_fxbucket.bench" in last and "No module named" in last:
            return _OTHER
        if "No module named" in last and self._python != sys.executable:
            return f"{self._python} cannot be used: {last}"
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"its process ended {ended}" + (f": {last}" if last else "")
