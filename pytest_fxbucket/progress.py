"""Saying what a long wait waits for, keeping quiet about a short one, and how long work took."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AFTER_S = 5.0
"""A wait that is shorter is not worth a line."""


class Progress:
    """Shows the newest message of a piece of work when nothing else was said for ``after_s`` seconds.

    ``show`` takes one line; None: nobody watches, and nothing is started. It is called from a thread of its own, and
    never after ``watching`` has ended.
    """

    def __init__(self, show: Callable[[str], None] | None = None, after_s: float = AFTER_S) -> None:
        self._show = show
        self._after_s = after_s
        self._news = threading.Condition()
        self._message: str | None = None
        self._open = False

    def say(self, message: str) -> None:
        """Set what is being waited for from now on; outside ``watching`` nobody hears it."""
        with self._news:
            self._message = message
            self._news.notify()

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Watch the work in the block, which ``what`` names in front of each message."""
        # Within work that is watched already, the outer watcher shows the messages.
        if self._show is None or self._open:
            yield
            return
        self._message, self._open = None, True
        watcher = threading.Thread(target=self._watch, args=(self._show, what), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            with self._news:
                self._open = False
                self._news.notify()
            watcher.join()

    def _watch(self, show: Callable[[str], None], what: str) -> None:
        shown = None
        with self._news:
            while self._open:
                # Something was said in time, so the silence begins anew.
                if self._news.wait(self._after_s) or not self._open:
                    continue
                # Before anything is said both are None, and no line is due.
                if self._message != shown:
                    shown = self._message
                    show(f"{what}: {shown}")


def on_stderr(after_s: float = AFTER_S) -> Progress:
    """Progress that stderr shows."""
    return Progress(lambda line: print(line, file=sys.stderr, flush=True), after_s)


class Seconds(dict[str, float]):
    """Seconds of what was done, by its name."""

    @contextmanager
    def of(self, what: str, rank: int) -> Iterator[None]:
        """Take the time of a block that works for ``rank``, if that is the first."""
        begin = time.perf_counter()
        yield
        if rank == 0:
            self[what] = time.perf_counter() - begin
