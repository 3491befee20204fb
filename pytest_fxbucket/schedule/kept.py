"""What kept its order: the heaviest increasing subsequence (Fredman 1975, with a Fenwick tree of maxima)."""

from __future__ import annotations

from collections.abc import Sequence


def kept(places: Sequence[int], weights: Sequence[int]) -> set[int]:
    """Indices of ``places`` (distinct numbers from 0 on) whose numbers increase and weigh most in all.

    Takes n log n. Of several equally heavy the one that is found first, so always the same.
    """
    size = max(places, default=-1) + 1
    best = [(0, -1)] * (size + 1)
    total, before = [0] * len(places), [-1] * len(places)
    for index, place in enumerate(places):
        weight, source, at = 0, -1, place
        while at > 0:
            if best[at][0] > weight:
                weight, source = best[at]
            at -= at & -at
        total[index], before[index] = weight + weights[index], source
        at = place + 1
        while at <= size:
            if total[index] > best[at][0]:
                best[at] = (total[index], index)
            at += at & -at
    found: set[int] = set()
    index = max(range(len(places)), key=lambda i: (total[i], -i), default=-1)
    while index >= 0:
        found.add(index)
        index = before[index]
    return found
