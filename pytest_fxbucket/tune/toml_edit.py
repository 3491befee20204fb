"""Changes keys of a TOML file and leaves all other text as it is, comments too.

The file is edited as lines, by simple patterns. After each edit the text is parsed and compared with the wanted values, so that
a wrong guess of a pattern is refused and never written.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.toml_text import to_toml

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]#]+?)\s*\]\]?\s*(#.*)?")
_COMMENT = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[^"'#])*(#.*)""")
"""A line that ends with a comment, which is its first group; a ``#`` within a string, of either quotes, begins none."""
_WIDTH = 128
_INDENT = "    "
Edits = Mapping[tuple[str, str], object]
"""By table and key the new value; None removes the key."""


def edited(text: str, edits: Edits, where: str) -> str:
    """``text`` with ``edits``.

    Raises PlanError, beginning with ``where``, for a key whose text cannot be found, as in an inline table or behind dots.
    """
    lines = text.splitlines(keepends=True)
    for (table, key), value in edits.items():
        lines = _with_key(lines, table, key, value)
        if tomllib_or_none("".join(lines)) != _expected(text, edits, (table, key)):
            raise PlanError(
                f"{where}: [{table}] {key} stands in no line of its own below [{table}], as where the table is an inline one; "
                "write it there by hand"
            )
    return "".join(lines)


def tomllib_or_none(text: str) -> dict[str, Any] | None:
    """What ``text`` says; None if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _expected(text: str, edits: Edits, last: tuple[str, str]) -> dict[str, Any]:
    """The parsed content that ``text`` is to have after the edits up to ``last``."""
    found = tomllib.loads(text)
    for (table, key), value in edits.items():
        inside = found.setdefault(table, {})
        if value is None:
            inside.pop(key, None)
        else:
            inside[key] = value
        if (table, key) == last:
            break
    return found


def _with_key(lines: Sequence[str], table: str, key: str, value: object) -> list[str]:
    begin, end = _section(lines, table)
    if begin < 0:
        return list(lines) if value is None else _with_table(lines, table, key, value)
    named = re.compile(rf"""\s*(?:{re.escape(key)}|"{re.escape(key)}"|'{re.escape(key)}')\s*=""")
    for place in range(begin, end):
        if named.match(lines[place]) and (last := _value_end(lines, place, end)):
            return [*lines[:place], *_rewritten(lines[place:last], key, value), *lines[last:]]
    if value is None:
        return list(lines)
    behind = max((place + 1 for place in range(begin, end) if _says(lines[place])), default=begin)
    # Comments at the end of a section mostly are about the next one, so the key goes before them.
    return [*_ended(lines[:behind]), *_key_lines(key, value, _ending(lines)), *lines[behind:]]


def _section(lines: Sequence[str], table: str) -> tuple[int, int]:
    """Where the lines below ``[table]`` begin and end; -1 if there is no such header."""
    begin = -1
    for place, line in enumerate(lines):
        found = _HEADER.fullmatch(line.rstrip("\r\n"))
        if found is None or not _is_header(lines, place):
            continue
        if begin >= 0:
            return begin, place
        if found[1] == "[" and found[2].strip("\"'") == table:
            begin = place + 1
    return begin, len(lines)


def _is_header(lines: Sequence[str], place: int) -> bool:
    """Whether line ``place`` is not in the middle of a list or a string: all text before it is valid TOML by itself."""
    return tomllib_or_none("".join(lines[:place])) is not None


def _says(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _value_end(lines: Sequence[str], place: int, end: int) -> int:
    """One past the last line of the value that begins in line ``place``; 0 if no value begins there."""
    return next((last for last in range(place + 1, end + 1) if tomllib_or_none("".join(lines[place:last])) is not None), 0)


def _rewritten(lines: Sequence[str], key: str, value: object) -> list[str]:
    """The lines of a key with another value; comments within the old value move before the key, one behind it stays there."""
    # A # may be part of a string. The comment behind the value begins at the first # before which the text has the whole value.
    text, ending = "".join(lines), _ending(lines)
    old = tomllib.loads(text)
    hashes = [place for place, char in enumerate(text) if char == "#"]
    behind = next((place for place in hashes if tomllib_or_none(text[:place]) == old), len(text))
    # Whether a # within the value begins a comment is guessed from the quotes before it in its line.
    comments = []
    for line in text[:behind].splitlines()[:-1] if "\n" in text[:behind].rstrip() else []:
        found = _COMMENT.fullmatch(line)
        comments += [found[1].rstrip() + ending] if found else []
    comment = text[behind:].strip()
    if value is None:
        return [*comments, *([comment + ending] if comment else [])]
    made = _key_lines(key, value, ending)
    if comment:
        made[-1] = f"{made[-1].rstrip()}  {comment}{ending}"
    return [*comments, *made]


def _key_lines(key: str, value: object, ending: str) -> list[str]:
    line = f"{key} = {to_toml(value)}"
    if not isinstance(value, list) or len(line) <= _WIDTH:
        return [line + ending]
    rows = [_INDENT]
    for item in map(to_toml, value):
        if len(rows[-1]) > len(_INDENT) and len(rows[-1]) + len(item) + 2 > _WIDTH:
            rows.append(_INDENT)
        rows[-1] += f"{item}, "
    return [f"{key} = [{ending}", *(row.rstrip() + ending for row in rows), f"]{ending}"]


def _with_table(lines: Sequence[str], table: str, key: str, value: object) -> list[str]:
    """``lines`` with a new table: behind ``[bucket]`` if there is one, else at the end."""
    ending = _ending(lines)
    begin, end = _section(lines, "bucket")
    behind = max((place + 1 for place in range(begin, end) if _says(lines[place])), default=begin) if begin >= 0 else len(lines)
    new = [ending, f"[{table}]{ending}", *_key_lines(key, value, ending)]
    return [*_ended(lines[:behind]), *new, *lines[behind:]]


def _ending(lines: Sequence[str]) -> str:
    return "\r\n" if lines and lines[0].endswith("\r\n") else "\n"


def _ended(lines: Sequence[str]) -> list[str]:
    """``lines``, with a line ending behind the last one, which a file may lack."""
    return [*lines[:-1], lines[-1] if lines[-1].endswith("\n") else lines[-1] + _ending(lines)] if lines else []
