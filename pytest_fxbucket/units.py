"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def human_bytes(size: int) -> str:
    """Write bytes with a binary unit and one decimal."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def counted(number: int, what: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def times(count: int) -> str:
    """never, once, 2 times."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def some(fqns: Sequence[str]) -> str:
    """The first three FQNs, and how many more."""
    shown = ", ".join(fqns[:3])
    return shown if len(fqns) <= 3 else f"{shown} and {len(fqns) - 3} more"
