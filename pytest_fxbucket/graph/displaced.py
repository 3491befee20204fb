"""How many nodes stand in another order among themselves than before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def displaced(before: Sequence[str], after: Sequence[str]) -> tuple[int, int]:
    """(moved, counted): names in both, and how many of them must have moved.

    Those that stayed are the longest run of names that has the same order in both (longest increasing subsequence, by patience
    sorting), so the count is the least that explains ``after``. O(n log n).
    """
    both = set(before).intersection(after)
    if [name for name in before if name in both] == [name for name in after if name in both]:
        return 0, len(both)  # nearly always: a good pass moves nothing but launches and waits
    place = {name: i for i, name in enumerate(before)}
    piles: list[int] = []
    counted = 0
    for name in after:
        if name in place:
            counted += 1
            at = bisect_left(piles, place[name])
            piles[at : at + 1] = [place[name]]
    return counted - len(piles), counted
