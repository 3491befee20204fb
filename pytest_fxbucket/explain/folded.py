"""Equal layers as one: rows that differ in nothing but the number of their layer, and so in those of its neighbours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<![^.+ ])(\d+)(?![^.+ ])")
_MARK = re.compile("\0(-?\\d+):(-?\\d+)\0")


@dataclass(frozen=True, slots=True)
class Row:
    """What is said of one entry, or of several equal ones."""

    entry: str
    """Whose number is folded."""
    cells: tuple[str, ...]
    """Whatever else is said, FQNs and entries in it written out."""
    count: int = 1


def fold(rows: Sequence[Row]) -> list[Row]:
    """``rows``, those of equal layers with neighbouring numbers as one, where its first was.

    ``layers.3`` becomes ``layers.[3-7]`` in the entry and in the cells, ``layers.2`` beside it ``layers.[2-6]``: in each row
    they stood as far apart.
    """
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    singles: list[tuple[int, Row]] = []
    for place, row in enumerate(rows):
        found = _stem(row.entry)
        if found is None:
            singles.append((place, row))
        else:
            stem, number = found
            marked = (_marked(text, stem, number) for text in row.cells)
            key = (stem, _marked(row.entry, stem, number, bare=True), *marked)
            alike.setdefault(key, []).append((number, place))
    folded = singles
    for (_, *texts), places in alike.items():
        for run in _runs(sorted(places)):
            entry, *cells = (_filled(text, run[0][0], run[-1][0]) for text in texts)
            folded.append((min(place for _, place in run), Row(entry, tuple(cells), len(run))))
    return [row for _, row in sorted(folded, key=lambda pair: pair[0])]


def fold_names(names: Sequence[str]) -> list[str]:
    """``names`` with neighbouring layers as one."""
    return [row.entry for row in fold([Row(name, ()) for name in names])]


def _stem(entry: str) -> tuple[str, int] | None:
    """What stands before the last number of the first name in ``entry``, and the number; None if it has none."""
    found = list(_NUMBER.finditer(entry.partition("+")[0]))
    return (entry[: found[-1].start()], int(found[-1][1])) if found else None


def _marked(text: str, stem: str, number: int, bare: bool = False) -> str:
    """``text`` with each number behind ``stem``, and each range of them, as the distance from ``number``.

    With nothing before it, only a number that a name follows (``0.weight``) is no count, unless ``bare``.
    """
    pattern = rf"(?<![\w.]){re.escape(stem)}(?:(\d+)|\[(\d+)-(\d+)\])" + (r"(?!\w)" if stem or bare else r"(?=\.[A-Za-z_])")

    def distance(found: re.Match[str]) -> str:
        low, high = (found[1], found[1]) if found[1] else (found[2], found[3])
        return f"{stem}\0{int(low) - number}:{int(high) - number}\0"

    return re.sub(pattern, distance, text)


def _filled(text: str, first: int, last: int) -> str:
    def numbers(found: re.Match[str]) -> str:
        low, high = first + int(found[1]), last + int(found[2])
        return str(low) if low == high else f"[{low}-{high}]"

    return _MARK.sub(numbers, text)


def _runs(places: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """(number, place) pairs, sorted, cut where a number does not follow the one before it."""
    runs: list[list[tuple[int, int]]] = []
    for number, place in places:
        if runs and number == runs[-1][-1][0] + 1:
            runs[-1].append((number, place))
        else:
            runs.append([(number, place)])
    return runs
