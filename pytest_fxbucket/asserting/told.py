"""What a user's test is told of two texts that differ."""

from __future__ import annotations

from difflib import unified_diff
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.artifacts import Folder


def difference_lines(given: object, expected: str, text: str, command: str, folder: Folder) -> list[str]:
    """The ``command`` that accepts ``text``, the text of ``given``; then what differs: of a graph in words, and as a diff.

    The command comes first, since pytest shows only the beginning of long explanations. All of ``text``, and of a diff that is
    cut, lies in ``folder``.
    """
    from pytest_fxbucket.golden.text import capped, change_lines

    folder.clear()
    diff = folder.file("golden.diff")
    folder.write("found.txt", text)
    if isinstance(given, str):
        lines = capped(list(unified_diff(_lines(expected), _lines(text), "expected", "found", lineterm="")), rest=diff)
    else:
        lines = change_lines(expected, text, ("expected", "found"), diff)
    return [f"to accept: {command}", *lines]


def _lines(text: str) -> list[str]:
    """Lines of ``text``, with a last one that does not end said as ``diff`` says it."""
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else [*lines, "\\ no line feed at the end"]
