"""String literals in source files: which one a call was given, and the same one with another value.

Finding is by the place that Python's bytecode gives of a call; writing is expecttest's.
"""

from __future__ import annotations

import ast
import re
import string
import tokenize
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from types import FrameType

from pytest_fxbucket.errors import UsageError

_LITERAL = re.compile(r"(?P<prefix>\w*)(?P<quote>'''|\"\"\"|'|\")")
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Call:
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


def call_in(frame: FrameType) -> Call:
    """The call that ``frame`` is at. Raises UsageError where Python runs without places (``-X no_debug_ranges``)."""
    places = frame.f_code.co_positions()
    line, end_line, _, end_byte = next(islice(places, frame.f_lasti // 2, None))
    if line is None or end_line is None or end_byte is None:
        raise UsageError(
            f"{frame.f_code.co_filename}: Python runs without places of calls; start it without -X no_debug_ranges"
        )
    return Call(frame.f_code.co_filename, line, (end_line, end_byte))


def second_argument(source: bytes, call: Call, value: str) -> Literal:
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
