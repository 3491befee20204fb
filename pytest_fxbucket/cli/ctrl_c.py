"""Ctrl-C that is noted when it comes, and heeded where work can end.

A KeyboardInterrupt that is raised wherever Python happens to be may be lost: an import of torch swallows it in code that C
calls. One that passes through the ``exec`` of a text, as a dataclass does it, makes Python end by the signal, whatever status
the command gives.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 130
"""Exit status that shells give a command which Ctrl-C ended."""


class CtrlC:
    """Whether Ctrl-C came."""

    def __init__(self) -> None:
        self.came = False
        self._waits = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if it came."""
        if self.came:
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the block as soon as it comes: for long waits, in which nothing is imported."""
        # Set before the check: a Ctrl-C between the two would be noted and not heeded during the wait.
        self._waits = True
        try:
            self.check()
            yield
        finally:
            self._waits = False

    def heard(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C: note the first one, and raise at a second, by somebody who does not want to wait."""
        again, self.came = self.came, True
        if again or self._waits:
            raise KeyboardInterrupt


@contextmanager
def noted() -> Iterator[CtrlC]:
    """Note Ctrl-C in the block, where it would be raised otherwise; that is in the main thread alone."""
    # Not over a handler that somebody else has set, such as one further out or one that ignores the signal.
    ctrl_c = CtrlC()
    is_raised = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_raised or threading.current_thread() is not threading.main_thread():
        yield ctrl_c
        return
    signal.signal(signal.SIGINT, ctrl_c.heard)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
