"""Goldens of users' own tests: ``assert graph == fxbucket_golden("name")``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.errors import GoldenError, UsageError, without_our_frames
from pytest_fxbucket.files import digest
from pytest_fxbucket.golden.accept import accepts
from pytest_fxbucket.golden.store import GoldenStore, render
from pytest_fxbucket.pytest_plugin.expectations.texts import RequestingTest, difference_lines, text_of

if TYPE_CHECKING:
    from pytest_fxbucket.pytest_plugin.expectations.texts import Entries

_LONGEST_NAME = 100
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


class GoldenBook:
    """The goldens of one test, and the results of comparing with them."""

    def __init__(self, asking: RequestingTest) -> None:
        options = asking.options
        self.asking, self.mode = asking, options.accept
        self.store = GoldenStore(options.golden_dir, options.rootdir, tuple(asking.arguments()))
        self.texts: list[dict[str, str]] = []
        """Plain dicts of path and digest: what each golden that may be written was compared with, also if nothing changed."""
        self.unread: list[str] = []
        """A sentence for each golden that could not be compared with."""
        self.hidden: list[tuple[str, ...]] = []
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
        path = self.store.path_for_test(self.asking.item.path, name)
        self.asking.fx.asked.append(path)
        return NamedGolden(self, path, plan)


class NamedGolden:
    """A golden to compare a graph, a step or a text with by ``==``; the failing test shows what differs.

    ``==`` is true if the texts are equal, and also where the accept option lets the golden be written, which then happens when
    the run ends. ``!=`` accepts nothing.
    """

    __hash__ = None  # type: ignore[assignment]  # as Python spells "not hashable"

    def __init__(self, book: GoldenBook, path: Path, entries: Entries | None) -> None:
        self._book, self._path, self._entries = book, path, entries
        self.explanation: tuple[str, ...] = ()
        """The explanation of the last comparison, for a test that fails on it; its first line is a summary."""

    @without_our_frames
    def __eq__(self, other: object) -> bool:
        text, accepted = self._compared(other)
        book = self._book
        if book.mode is not None and accepts(book.mode, self._path):
            book.texts.append({"path": str(self._path), "digest": digest(text.encode())})
            if accepted != text:
                book.asking.fx.accepted.add(self._path, render(text))
            return True
        if isinstance(accepted, GoldenError):
            book.unread.append(str(accepted))
            self.explanation = (str(accepted),)
        elif accepted != text:
            command, folder = book.store.accept_command(self._path), book.asking.folder(self._path.stem)
            difference = difference_lines(other, accepted, text, command, folder)
            self.explanation = (f"the text is not the one in {self._shown}", *difference)
        return accepted == text

    @without_our_frames
    def __ne__(self, other: object) -> bool:
        text, accepted = self._compared(other)
        if isinstance(accepted, GoldenError):
            raise accepted
        self.explanation = (f"the text is the one in {self._shown}",)
        return accepted != text

    @without_our_frames
    def __bool__(self) -> bool:
        raise UsageError(f"golden {self._shown} is true or false only compared: assert graph == fxbucket_golden(...)")

    def __repr__(self) -> str:
        return f"<golden {self._shown}>"

    @property
    def _shown(self) -> str:
        return self._book.store.shown(self._path)

    def _compared(self, other: object) -> tuple[str, str | GoldenError]:
        """The text of ``other``, and that of the golden, or why there is none."""
        text = text_of(other, None if isinstance(other, str) else self._book.asking.plan_run(), self._entries)
        self._book.asking.fx.compared.append(self._path)
        try:
            return text, self._book.store.read(self._path)
        except GoldenError as error:
            return text, error


def explained(left: object, right: object) -> tuple[str, ...] | None:
    """The explanation of a comparison that failed; None if no golden took part."""
    for one in (left, right):
        if isinstance(one, NamedGolden) and one.explanation:
            one._book.hidden.append(one.explanation)
            return one.explanation
    return None


# The GoldenBook of a test, and what the test's report takes from it.


_BOOK: pytest.StashKey[GoldenBook] = pytest.StashKey()
# What pytest shows of an explanation without -vv: https://docs.pytest.org/en/stable/reference/reference.html#truncation
_SHOWN_LINES, _SHOWN_CHARACTERS = 8, 640


def book_of(request: pytest.FixtureRequest) -> GoldenBook:
    """The goldens of the test that asks."""
    book = request.node.stash[_BOOK] = GoldenBook(RequestingTest(request))
    return book


def texts_of(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
    """What the writing process needs of the item's phase, as plain data; the report gets explanations that pytest cut."""
    book = item.stash.get(_BOOK, None)
    if book is None:
        return {}
    if report.when == "call":
        _show(item, report, book)
    texts = [*book.texts]
    book.texts.clear()
    return {"texts": texts} if texts else {}


def _show(item: pytest.Item, report: pytest.TestReport, book: GoldenBook) -> None:
    if report.failed and item.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS) < 2:
        for lines in dict.fromkeys(book.hidden):
            if len(lines) > _SHOWN_LINES or sum(map(len, lines)) > _SHOWN_CHARACTERS:
                report.sections.append((lines[0], "\n".join(lines[1:])))
    if report.passed and book.unread and not hasattr(report, "wasxfail"):
        # ``assert not graph == golden``, or a comparison that nobody asserts: nothing was compared, so nothing has passed.
        report.outcome = "failed"
        report.longrepr = book.unread[0]
