"""Expectations that stand in the test itself: finds the literal that a call was given in its source, to rewrite it.

The call is found by the position that Python's bytecode has of it; the new literal is written by expecttest.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import string
import sys
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pytest_fxbucket.errors import UsageError, without_our_frames
from pytest_fxbucket.pytest_plugin.expectations.texts import RequestingTest, difference_lines, text_of

_LITERAL = re.compile(r"(?P<prefix>\w*)(?P<quote>'''|\"\"\"|'|\")")
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class ExpectCall:
    """Where a call stands in its file: its first line, and line and byte behind its last character."""

    file: str
    line: int
    end: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Literal:
    """A string literal in a source: bytes from ``start`` to ``end``."""

    start: int
    end: int
    text: str
    """As it is written."""


def call_in(frame: FrameType) -> ExpectCall:
    """The call that ``frame`` is at. Raises UsageError where Python runs without places (``-X no_debug_ranges``)."""
    places = frame.f_code.co_positions()  # one for each instruction of two bytes, while f_lasti counts bytes
    line, end_line, _, end_byte = next(islice(places, frame.f_lasti // 2, None))
    if line is None or end_line is None or end_byte is None:
        raise UsageError(
            f"{frame.f_code.co_filename}: Python runs without places of calls; start it without -X no_debug_ranges"
        )
    return ExpectCall(frame.f_code.co_filename, line, (end_line, end_byte))


def second_argument(source: bytes, call: ExpectCall, value: str) -> Literal:
    """The literal that is the second argument (or ``expected``) of ``call`` in ``source``, whose value is ``value``.

    Raises UsageError, one sentence without the place, if there is no such literal.
    """
    try:
        encoding, _ = tokenize.detect_encoding(BytesIO(source).readline)
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        raise UsageError("the file is no Python source now") from None
    if encoding != "utf-8":
        raise UsageError(f"the file is in {encoding}, and only UTF-8 without a byte order mark is rewritten")
    # A call is told by its end, since calls in a chain such as f(a)(b) begin at one place, but each has its own last bracket.
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    node = next((node for node in calls if (node.end_lineno, node.end_col_offset) == call.end), None)
    if node is None:
        raise UsageError("the call is not there now")
    given = [*node.args[1:2], *(one.value for one in node.keywords if one.arg == "expected")]
    if not given or not isinstance(given[0], ast.Constant) or not isinstance(given[0].value, str):
        raise UsageError("what is expected is no string literal in the call itself, so there is nothing to rewrite")
    found = _literal(source, given[0])
    if not _is_one_string(found.text):
        raise UsageError("what is expected is several literals in a row; make one of them")
    if given[0].value != value:
        raise UsageError("the literal has another value than the one that ran")
    return found


def written(old: str, value: str) -> str:
    """The literal ``old`` with ``value``: in triple quotes of its kind, raw if it was raw and can be.

    Raises UsageError for a value that expecttest does not write.
    """
    from expecttest import replace_string_literal

    match = _LITERAL.match(old)
    assert match is not None
    quote = "'''" if match["quote"] == "'''" else '"""'
    raw = "r" if "r" in match["prefix"].lower() else ""
    try:
        new, _ = replace_string_literal(f"{raw}{quote}{quote}", 1, 1, value)
    except AssertionError:
        foreign = next(character for character in value if character not in string.printable)
        raise UsageError(
            f"{foreign!r} cannot stand in a rewritten literal, which is printable ASCII; escape it first"
        ) from None
    if ast.literal_eval(new) != value:
        raise UsageError("the text cannot be written as a literal that gives it back; compare its repr() instead")
    return new


def _literal(source: bytes, node: ast.Constant) -> Literal:
    """Bytes of ``node``: its columns count bytes in UTF-8."""
    begins = [0, *(match.end() for match in _LINE_END.finditer(source))]
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    start = begins[node.lineno - 1] + node.col_offset
    end = begins[node.end_lineno - 1] + node.end_col_offset
    return Literal(start, end, source[start:end].decode("utf-8"))


def _is_one_string(text: str) -> bool:
    try:
        tokens = list(tokenize.tokenize(BytesIO(text.encode()).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return [token.type for token in tokens if token.string.strip() and token.type != tokenize.ENCODING] == [tokenize.STRING]


# Expectations that stand in the test itself: ``fxbucket_expect(graph, """...""")``, rewritten in place when accepted.
#
# A test makes edits, plain dicts that leave with its report; one process writes each source file, once and whole, when the run
# ends. An edit names the bytes of the literal and the digest of the whole file: if the file has changed since, the edit is
# void.


Edit = Mapping[str, Any]
"""file, digest, start, end, line, old, new, test: bytes of the literal in the file of that digest, its old and new text."""


class Expectation:
    """What the fixture ``fxbucket_expect`` gives to one test."""

    def __init__(self, asking: RequestingTest) -> None:
        # Without links, as the file of the test.
        self._asking, self._mode, self._rootdir = asking, asking.options.accept, asking.options.rootdir.resolve()
        self.edits: list[Edit] = []
        """Also for expectations that stay as they are, with ``new`` equal to ``old``, so that two calls that disagree show."""

    @without_our_frames
    def __call__(self, actual: object, expected: str) -> None:
        """Compare the text of ``actual`` (a str as it is) with the string literal ``expected``.

        Raises AssertionError if they differ and the literal is not to be rewritten; UsageError if it is to be, and cannot be.
        """
        __tracebackhide__ = True
        if not isinstance(expected, str):
            raise UsageError(f"fxbucket_expect: {expected!r} is no expectation; expected a string literal")
        text = actual if isinstance(actual, str) else text_of(actual, self._asking.plan_run())
        # An empty literal stands where nothing was accepted yet.
        kind = "changed" if expected else "new"
        if self._mode in (kind, "all"):
            self._accept(sys._getframe(2), expected, text)  # frame 1 is the decorator's, frame 2 the caller's
        elif text != expected:
            raise AssertionError("\n".join(self._difference(actual, expected, text, kind)))

    def _accept(self, frame: Any, expected: str, text: str) -> None:
        try:
            call = call_in(frame)
            edit = self._edit(call, expected, text)
        except UsageError:
            if text == expected:  # nothing is to be written, so it need not be possible
                return
            raise
        self.edits.append(edit)

    def _edit(self, call: ExpectCall, expected: str, text: str) -> Edit:
        sources = self._asking.fx.sources
        path = os.path.realpath(call.file)
        shown = shown_in(self._rootdir, path)
        if not Path(path).is_relative_to(self._rootdir):
            raise UsageError(f"{shown}:{call.line}: lies outside rootdir {self._rootdir}, where nothing is rewritten")
        source = sources.read(path, shown)
        try:
            literal = second_argument(source, call, expected)
            new = literal.text if text == expected else written(literal.text, text)
        except UsageError as error:
            raise UsageError(f"{shown}:{call.line}: fxbucket_expect: {error}") from None
        return {
            "file": path,
            "digest": sources.digests[path],
            "start": literal.start,
            "end": literal.end,
            "line": call.line,
            "old": literal.text,
            "new": new,
            "test": self._asking.item.nodeid,
        }

    def _difference(self, actual: object, expected: str, text: str, kind: str) -> list[str]:
        nothing = "" if expected else ", which is nothing yet"
        nodeid = self._asking.item.nodeid
        command = shlex.join(["pytest", *self._asking.arguments(), f"--fxbucket-accept={kind}"])
        difference = difference_lines(actual, expected, text, command, self._asking.folder(nodeid.rpartition("::")[2]))
        return [f"the text is not what is expected here{nothing}", *difference]


def shown_in(rootdir: Path, name: str) -> str:
    """The path ``name`` from ``rootdir`` on, if it lies below."""
    path = Path(name)
    return path.relative_to(rootdir).as_posix() if path.is_relative_to(rootdir) else name


EXPECT = "fxbucket_expect"
_EXPECTATION: pytest.StashKey[Expectation] = pytest.StashKey()


def expectation_of(request: pytest.FixtureRequest) -> Expectation:
    """The inline expectations of the test that asks."""
    expectation = request.node.stash[_EXPECTATION] = Expectation(RequestingTest(request))
    return expectation


def edits_of(item: pytest.Item) -> dict[str, Any]:
    """The item's edits as plain data, for the process that writes them; they are handed out once."""
    expectation = item.stash.get(_EXPECTATION, None)
    edits = [*expectation.edits] if expectation is not None else []
    if expectation is not None:
        expectation.edits.clear()
    return {"edits": edits} if edits else {}
