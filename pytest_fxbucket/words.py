"""Values, numbers and names as people read them, and the largest numbers that anybody can mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches


def human_bytes(size: float) -> str:
    """Write bytes with a binary unit and one decimal."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def plural(noun: str, count: int) -> str:
    """``node`` of one, else ``nodes``, ``launches``, ``entries``."""
    if count == 1:
        return noun
    return noun[:-1] + "ies" if noun.endswith("ry") else noun + ("es" if noun.endswith("ch") else "s")


def counted(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``, ``3 launches``, ``4,000 entries``."""
    return f"{count:,} {plural(noun, count)}"


def times(count: int) -> str:
    """never, once, 2 times."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def show(value: object) -> str:
    """Write a value as a plan file would, cut at 60 characters."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to write the longest
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_or_other(words: list[str]) -> str:
    """Join words as a sentence does: ``a, b or c``."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def nearest(word: str, known: list[str]) -> str:
    """Name the known word nearest to ``word``, however both are capitalized, as ``; did you mean "x"?``, or nothing."""
    lower = {one.lower(): one for one in reversed(known)}
    close = get_close_matches(word.lower(), list(reversed(lower)), n=1, cutoff=0.5)
    return f'; did you mean "{lower[close[0]]}"?' if close else ""


MOST_RANKS = 1 << 17
"""Most ranks of a mesh: more than any job has, and few enough to be looked at in a minute."""
LONGEST_S = 1_000_000
"""Twelve days; the kernel's own waits end at twice that."""
