"""Which microbatch compute belongs to: told by where forward and backward take turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def in_rounds(places: Sequence[int], others: Sequence[int]) -> list[list[int]]:
    """``places``, ascending, of one direction, parted where any of ``others``, ascending, of the other one stands between."""
    rounds: list[list[int]] = []
    turn = -1
    for place in places:
        now = bisect_right(others, place)
        if now != turn or not rounds:
            rounds.append([])
        rounds[-1].append(place)
        turn = now
    return rounds


def of_round(rounds: Sequence[list[int]], number: int | None) -> list[int]:
    """The round ``number`` (None: the last) of ``rounds``; the last of them if there are not so many, nothing without any."""
    if not rounds:
        return []
    return rounds[-1] if number is None else rounds[min(number, len(rounds) - 1)]
