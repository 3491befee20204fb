"""Reports of ranks on each step while they run: each writes a line of JSON into one named pipe."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 300
"""Characters of a difference that are reported, of which JSON makes up to 12 bytes each: only up to 4,096 bytes do lines of
several writers stay whole in a pipe."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of one rank."""

    rank: int
    step: int
    """From 0."""
    graph: float
    """Loss of the bucketed graph."""
    eager: float
    """Loss of the eager step."""
    first: str
    """The rank's first difference so far; empty if there is none."""
    peak_bytes: int
    """Largest resident size of the rank's process so far."""


class StepReporter:
    """A rank's end of the pipe at ``path``; without one it reports nothing."""

    def __init__(self, path: str, rank: int) -> None:
        self._rank, self._fd = rank, os.open(path, os.O_WRONLY) if path else -1

    def report(self, step: int, graph: Tensor, eager: Tensor, first: str) -> None:
        """Say what one step gave: both losses, and the first difference so far."""
        if self._fd >= 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            line = json.dumps(asdict(StepReport(self._rank, step, float(graph), float(eager), first[:_MOST], peak)))
            os.write(self._fd, f"{line}\n".encode())

    def close(self) -> None:
        """Close the pipe; nothing more is reported."""
        if self._fd >= 0:
            os.close(self._fd)


class StepReports:
    """The reading end of a new pipe at ``path``. While entered, it calls ``on_step`` for each step that all ranks reported.

    ``on_step`` runs on a thread of its own, and gets the reports of the ``world`` ranks in rank order. If it raises, what runs
    meanwhile is stopped as by Ctrl-C, and its exception is raised at the end.
    """

    def __init__(self, path: Path, world: int, on_step: Callable[[list[StepReport]], None]) -> None:
        self._world, self._on_step = world, on_step
        self._steps: dict[int, dict[int, StepReport]] = {}
        self._failed: Exception | None = None
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)  # opens without waiting for a writer, and never reads an end of file
        self._thread = Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.write(self._fd, b"\n")  # ends :meth:`_listen`: closing does not, as this end is a writer as well
        try:
            self._thread.join()
        except KeyboardInterrupt:
            if self._failed is None:
                raise
        os.close(self._fd)
        if self._failed is not None:
            raise self._failed

    def _listen(self) -> None:
        # To the end in any case: ranks whose reports nobody reads would wait for ever.
        with os.fdopen(os.dup(self._fd), encoding="utf-8") as lines:
            for line in lines:
                if not line.strip():
                    return
                if self._failed is None:
                    self._told(StepReport(**json.loads(line)))

    def _told(self, report: StepReport) -> None:
        ranks = self._steps.setdefault(report.step, {})
        ranks[report.rank] = report
        if len(ranks) == self._world:
            del self._steps[report.step]
            try:
                self._on_step([ranks[rank] for rank in range(self._world)])
            except Exception as error:
                self._failed = error
                os.kill(os.getpid(), signal.SIGINT)  # nobody wants the run any more, and the main thread waits for it
