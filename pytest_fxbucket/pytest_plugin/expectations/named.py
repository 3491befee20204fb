"""Goldens of users' own tests: ``assert graph == fxbucket_golden("name")``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import GoldenError, UsageError, without_our_frames
from pytest_fxbucket.files import digest
from pytest_fxbucket.golden.accept import accepts
from pytest_fxbucket.golden.store import GoldenStore, render
from pytest_fxbucket.pytest_plugin.expectations.texts import difference_lines, text_of

if TYPE_CHECKING:
    from pytest_fxbucket.artifacts import Folder
    from pytest_fxbucket.pytest_plugin.expectations.texts import Entries
    from pytest_fxbucket.run import PlanRun

_LONGEST_NAME = 100
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


@dataclass(slots=True, repr=False)
class GoldenBook:
    """The goldens of one test: where they lie, what may be written, and what came of comparing with them."""

    store: GoldenStore
    file: Path
    """Of the test."""
    mode: str | None
    """Which goldens may be written: new, changed, all; None: none."""
    accept: Callable[[Path, str], None]
    """Takes the path and the whole text of a golden that is to be written."""
    compared: list[Path]
    """Takes the path of each golden that was compared with."""
    run: Callable[[], PlanRun | None]
    """Gives the plan in use."""
    folder: Callable[[str], Folder]
    """Gives the folder for what is too long to be shown of the golden of that name."""
    texts: list[dict[str, str]] = field(default_factory=list)
    """Plain dicts of path and digest: what each golden that may be written was compared with, also if nothing changed."""
    unread: list[str] = field(default_factory=list)
    """A sentence for each golden that could not be compared with."""
    hidden: list[tuple[str, ...]] = field(default_factory=list)
    """Explanations that pytest has not shown whole."""

    @without_our_frames
    def golden(self, name: str, plan: Entries | None = None) -> NamedGolden:
        """The golden ``name`` of this test's file; ``plan`` groups parameters, as ``[bucket] plan`` does.

        Raises UsageError for a name that is no file name, GoldenError where the test's file has no goldens.
        """
        if not isinstance(name, str):
            raise UsageError(f"fxbucket_golden: {name!r} is no name; expected a str")
        if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
            shown = name if len(name) <= _LONGEST_NAME else f"{name[:20]}..."
            raise UsageError(
                f"fxbucket_golden: {shown!r} is no name for a golden; expected at most {_LONGEST_NAME} letters, digits, "
                "_, - and dots, the first no dot"
            )
        return NamedGolden(self, self.store.path_for_test(self.file, name), plan)


class NamedGolden:
    """A golden that a graph, a step or a text is compared with by ``==``; what differs is told where the test fails.

    ``==`` is true if the texts are equal, and also where the accept option lets the golden be written, which then happens when
    the run ends. ``!=`` accepts nothing.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, book: GoldenBook, path: Path, entries: Entries | None) -> None:
        self._book, self._path, self._entries = book, path, entries
        self.told: tuple[str, ...] = ()
        """What is to be said of the last comparison, if it was not as the test expects; the first line says it all."""

    @without_our_frames
    def __eq__(self, other: object) -> bool:
        text, accepted = self._compared(other)
        book = self._book
        if book.mode is not None and accepts(book.mode, self._path):
            book.texts.append({"path": str(self._path), "digest": digest(text.encode())})
            if accepted != text:
                book.accept(self._path, render(text))
            return True
        if isinstance(accepted, GoldenError):
            book.unread.append(str(accepted))
            self.told = (str(accepted),)
        elif accepted != text:
            command, folder = book.store.accept_command(self._path), book.folder(self._path.stem)
            told = difference_lines(other, accepted, text, command, folder)
            self.told = (f"the text is not the one in {self._shown}", *told)
        return accepted == text

    @without_our_frames
    def __ne__(self, other: object) -> bool:
        text, accepted = self._compared(other)
        if isinstance(accepted, GoldenError):
            raise accepted
        self.told = (f"the text is the one in {self._shown}",)
        return accepted != text

    def __repr__(self) -> str:
        return f"<golden {self._shown}>"

    @property
    def _shown(self) -> str:
        return self._book.store.shown(self._path)

    def _compared(self, other: object) -> tuple[str, str | GoldenError]:
        """The text of ``other``, and that of the golden, or why there is none."""
        text = text_of(other, None if isinstance(other, str) else self._book.run(), self._entries)
        self._book.compared.append(self._path)
        try:
            return text, self._book.store.read(self._path)
        except GoldenError as error:
            return text, error


def explained(left: object, right: object) -> tuple[str, ...] | None:
    """What is to be said of a comparison that failed; None if no golden took part."""
    for one in (left, right):
        if isinstance(one, NamedGolden) and one.told:
            one._book.hidden.append(one.told)
            return one.told
    return None
