"""Expectations that stand in the test itself: ``fxbucket_expect(graph, \"\"\"...\"\"\")``, rewritten in place when accepted.

A test makes edits, plain dicts that leave with its report; one process writes each source file, once and whole, when the run
ends. An edit names the bytes of the literal and the digest of the file that it is an edit of: on any other file it is nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.asserting.sources import Sources
from pytest_fxbucket.asserting.texts import text_of
from pytest_fxbucket.asserting.told import difference_lines
from pytest_fxbucket.errors import UsageError, without_our_frames

if TYPE_CHECKING:
    from pytest_fxbucket.artifacts import Folder
    from pytest_fxbucket.asserting.literal import Call
    from pytest_fxbucket.run import PlanRun

Edit = Mapping[str, Any]
"""file, digest, start, end, line, old, new, test: bytes of the literal in the file of that digest, its old and new text."""


@dataclass(slots=True, repr=False)
class Expectation:
    """What the fixture ``fxbucket_expect`` gives to one test."""

    rootdir: Path
    test: str
    """Node id."""
    mode: str | None
    """Which expectations may be rewritten: new (empty ones), changed, all; None: none."""
    command: Callable[[str], str]
    """Gives the command that accepts, by mode."""
    run: Callable[[], PlanRun | None]
    sources: Sources
    folder: Folder
    """For what is too long to be shown."""
    edits: list[Edit]
    """Takes the edits; one of an expectation that stays as it is has ``new`` equal to ``old``."""

    @without_our_frames
    def __call__(self, actual: object, expected: str) -> None:
        """Compare the text of ``actual`` (a str as it is) with the string literal ``expected``.

        Raises AssertionError if they differ and the literal is not to be rewritten; UsageError if it is to be, and cannot be.
        """
        __tracebackhide__ = True
        if not isinstance(expected, str):
            raise UsageError(f"fxbucket_expect: {expected!r} is no expectation; expected a string literal")
        text = actual if isinstance(actual, str) else text_of(actual, self.run())
        kind = "changed" if expected else "new"
        if self.mode in (kind, "all"):
            self._accept(sys._getframe(2), expected, text)
        elif text != expected:
            raise AssertionError("\n".join(self._difference(actual, expected, text, kind)))

    def _accept(self, frame: Any, expected: str, text: str) -> None:
        from pytest_fxbucket.asserting.literal import call_in

        try:
            call = call_in(frame)
            edit = self._edit(call, expected, text)
        except UsageError:
            if text == expected:  # nothing is to be written, so it need not be possible
                return
            raise
        self.edits.append(edit)

    def _edit(self, call: Call, expected: str, text: str) -> Edit:
        from pytest_fxbucket.asserting.literal import second_argument, written

        path = os.path.realpath(call.file)
        shown = self._shown(path)
        if not Path(path).is_relative_to(self.rootdir):
            raise UsageError(f"{shown}:{call.line}: lies outside rootdir {self.rootdir}, where nothing is rewritten")
        source = self.sources.read(path, shown)
        try:
            literal = second_argument(source, call, expected)
            new = literal.text if text == expected else written(literal.text, text)
        except UsageError as error:
            raise UsageError(f"{shown}:{call.line}: fxbucket_expect: {error}") from None
        return {
            "file": path,
            "digest": self.sources.digests[path],
            "start": literal.start,
            "end": literal.end,
            "line": call.line,
            "old": literal.text,
            "new": new,
            "test": self.test,
        }

    def _difference(self, actual: object, expected: str, text: str, kind: str) -> list[str]:
        nothing = "" if expected else ", which is nothing yet"
        told = difference_lines(actual, expected, text, self.command(kind), self.folder)
        return [f"the text is not what is expected here{nothing}", *told]

    def _shown(self, path: str) -> str:
        return Path(path).relative_to(self.rootdir).as_posix() if Path(path).is_relative_to(self.rootdir) else path
