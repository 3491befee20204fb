"""The checks of a plan, in the order of their items."""

from __future__ import annotations

CHECKS = ("audit", "golden", "collectives", "same", "bitwise", "eager", "benchmark")
ON_RANKS = frozenset({"bitwise", "eager", "benchmark"})
"""Checks that run the step, on `[run] world`."""
