"""Some of many, spread evenly and always the same ones."""

from __future__ import annotations

from collections.abc import Sequence


def picked(column: Sequence[float], most: int) -> list[float]:
    """At most ``most`` of ``column``, evenly over its length."""
    if len(column) <= most:
        return list(column)
    return [column[number * len(column) // most] for number in range(most)]


def jitter(number: int) -> float:
    """Between -0.5 and 0.5, spread evenly and always the same: multiples of the golden ratio (Weyl)."""
    return round((number * 0.6180339887498949) % 1.0 - 0.5, 4)
