"""Cost models as users write them, good and bad."""

from __future__ import annotations

from torch import fx


def slow_gathers(node: fx.Node) -> float | None:
    return 1.0 if "all_gather" in str(node.target) else None


def not_a_number(node: fx.Node) -> float:
    return float("nan")


def negative(node: fx.Node) -> float:
    return -1.0
