"""Token ids of a configuration: few of them, the special ones among them; and a range without special ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

FEW = 256
"""The small vocabulary."""


def special(values: Mapping[str, Any]) -> Iterator[int]:
    """Ids that have a meaning: of padding, of the begin, of an image, of parts too."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from special(value)
        elif key.endswith(("token_id", "token_index")):
            found = value if isinstance(value, list) else [value]
            yield from (one for one in found if isinstance(one, int) and one >= 0)


def few_tokens(values: Mapping[str, Any]) -> dict[int, int]:
    """A small id for each special one that is none: of the last of the small vocabulary that have no meaning yet."""
    known = set(special(values))
    free = (number for number in reversed(range(FEW)) if number not in known)
    return {one: next(free) for one in sorted(known, reverse=True) if one >= FEW}


def plain_range(values: Mapping[str, Any], vocab: int) -> tuple[int, int]:
    """The longest range [low, high) of ids below ``vocab`` that has no special one in it."""
    ends = [-1, *sorted({one for one in special(values) if one < vocab}), vocab]
    _, low, high = max((high - low, low + 1, high) for low, high in pairwise(ends))
    return low, high
