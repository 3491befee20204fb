"""The largest numbers that anybody can mean."""

from __future__ import annotations

MOST_RANKS = 1 << 17
"""Of a mesh: more than any job has, and what can still be looked at in a minute."""
LONGEST_S = 1_000_000
"""Twelve days; the kernel's own waits end at twice that."""
