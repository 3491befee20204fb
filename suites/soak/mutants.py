"""Garbage that is made of what is well: texts, plans, stored runs and command lines with something wrong in them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

_PIECES = ("", "\x00", "\n", "\r", "[", "]]", '"', "'''", "::", "=", "\\", "é", "\ufeff", "\u202e", "🦙", "nan", "-1", "1e999")
_PIECES += ("9" * 5000, "[" * 3000, "true", "{}", "#", "# end ", "<<<<<<< ours\n", "null", ",", "../../etc", "%s", "\x1b[31m")
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**22,
    2**64,
    -(10**400),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 9000,
    "é\x00",
)
_VALUES += ([], {}, [[]], {"": 0}, [None], "module:callable", ["layers.*"], "\ud800".encode("utf-8", "replace").decode())


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """A few edits of a file: pieces gone, doubled, moved, put in, or with a bit turned."""
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        data = chance.choice(_EDITS)(data, chance)
    return data


def _span(data: bytes, chance: random.Random) -> tuple[int, int]:
    begin = chance.randrange(len(data) + 1)
    return begin, min(len(data), begin + chance.choice((1, 1, 3, 20, 200)))


def _turn_a_bit(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return b"\xff"
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def _take_out(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:begin] + data[end:]


def _double(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:end] + data[begin:end] + data[end:]


def _put_in(data: bytes, chance: random.Random) -> bytes:
    begin, _ = _span(data, chance)
    return data[:begin] + chance.choice(_PIECES).encode() + data[begin:]


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _swap_lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if len(lines) > 1:
        a, b = chance.sample(range(len(lines)), 2)
        lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


_EDITS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _turn_a_bit,
    _take_out,
    _double,
    _put_in,
    _cut,
    _swap_lines,
)


def broken_plan(text: str, chance: random.Random) -> str:
    """A plan that is wrong for certain, in one place: its kinds are those of :data:`_WRONGS`."""
    return chance.choice(_WRONGS)(text, chance)


def _unknown_table(text: str, chance: random.Random) -> str:
    return f"[{chance.choice(('modle', 'Bucket', 'run_', 'x', 'bucket.x'))}]\nx = 1\n{text}"


def _unknown_key(text: str, chance: random.Random) -> str:
    return _in_table(text, chance, f"{chance.choice(('plann', 'Factory', 'timeout', 'worldd'))} = 1")


def _key_twice(text: str, chance: random.Random) -> str:
    lines = re.findall(r"^[a-z_]+ *=.*$", text, re.M)
    line = chance.choice([one for one in lines if one.count('"') % 2 == 0 and not one.rstrip().endswith(("[", "{"))])
    return text.replace(line, f"{line}\n{line}", 1)


def _no_value(text: str, chance: random.Random) -> str:
    return _in_table(text, chance, chance.choice(("a =", "= 3", "a = [", 'b = "', "c = {", "a b = 3")))


def _wrong_number(text: str, chance: random.Random) -> str:
    key = chance.choice(("steps", "seed", "timeout_s"))
    value = chance.choice(("-1", "true", '"3"', "[3]", "{}", "9" * 5000, "1" + "0" * 22, "nan", "0x" + "f" * 4000))
    return f"{re.sub(r'(?m)^' + key + r' *=.*$', '', _without_table(text, 'run'))}\n[run]\n{key} = {value}\n"


def _wrong_row(text: str, chance: random.Random) -> str:
    row = chance.choice(
        ("", 'id = ""', 'id = "a/b"', "id = 3", 'id = "x"', 'id = "x"\nrn.steps = 1', 'id = "x"\nrun.steps = 0')
    )
    return f"{text}\n[[matrix]]\n{row}\n"


def _no_subject(text: str, chance: random.Random) -> str:
    return re.sub(r"(?m)^factory *=.*$", "", text)


_WRONGS: tuple[Callable[[str, random.Random], str], ...] = (
    _unknown_table,
    _unknown_key,
    _key_twice,
    _no_value,
    _wrong_number,
    _wrong_row,
    _no_subject,
)


def _in_table(text: str, chance: random.Random, line: str) -> str:
    headers = re.findall(r"^\[(?:model|graph|parallel|bucket)\]$", text, re.M)
    header = chance.choice(headers)
    return text.replace(header, f"{header}\n{line}", 1)


def _without_table(text: str, name: str) -> str:
    return re.sub(rf"(?ms)^\[{name}\]\n.*?(?=^\[|\Z)", "", text)


def broken_run(fields: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The fields of a stored run, one of them gone or of a value that it cannot have, so that it is no run for certain."""
    found = json.loads(json.dumps(fields))
    key = chance.choice(sorted(found.keys() - {"row", "plan", "commit"}))
    if chance.random() < 0.3:
        del found[key]
    else:
        wrong = [value for value in _VALUES if not _may_be(found[key], value)]
        found[key] = chance.choice(wrong)
    return dict(found)


def _may_be(was: Any, value: Any) -> bool:
    """Whether a field that was ``was`` may be ``value``: of one kind, nobody but the field's own rule can tell."""
    numbers = (int, float)
    if isinstance(was, bool) or isinstance(value, bool):
        return isinstance(was, bool) and isinstance(value, bool)
    if isinstance(was, numbers) and isinstance(value, numbers):
        return 0 <= value < 10**6
    return isinstance(value, type(was))


def mutated_words(words: Sequence[str], chance: random.Random, known: Sequence[str]) -> list[str]:
    """A command line with words gone, doubled, moved, changed or put in; no word holds a zero byte, which none can."""
    found = list(words)
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(found) + 1)
        kind = chance.randrange(5)
        if kind == 0 and place < len(found):
            del found[place]
        elif kind == 1 and place < len(found):
            found.insert(place, found[place])
        elif kind == 2:
            found.insert(place, chance.choice(known))
        elif kind == 3:
            found.insert(place, chance.choice(_PIECES))
        elif place < len(found):
            found[place] = mutated_bytes(found[place].encode("utf-8", "surrogateescape"), chance).decode(
                "utf-8", "surrogateescape"
            )
    return [word.replace("\x00", "") for word in found]
