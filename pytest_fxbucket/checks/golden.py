"""Is the schedule still the reviewed one? The text of a plan's golden, and what a mismatch says."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import unified_diff
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.text import schedule_lines
from pytest_fxbucket.graph.words import differences

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import MeshDim
    from pytest_fxbucket.graph.schedule import Schedule

_DIFF_LINES = 60


def golden_text(plan: str, mesh: Sequence[MeshDim], schedules: dict[str, Schedule]) -> str:
    """Body of the golden of ``plan`` (its path from rootdir, with the matrix id); ``schedules`` by phase of the step."""
    lines = [f"plan {plan}", "mesh " + " ".join(f"{dim.name}={dim.size}" for dim in mesh), ""]
    for phase, schedule in schedules.items():
        lines += [f"graph {phase}", "", *schedule_lines(schedule), ""]
    return "\n".join(lines).rstrip() + "\n"


def mismatch_lines(accepted: str, found: str, command: str) -> list[str]:
    """What changed in words, then the diff, then the command that accepts it."""
    old, new = accepted.splitlines(), found.splitlines()
    words = differences(old, new) or ["the text changed, but no bucket, launch or wait did"]
    diff = list(unified_diff(old, new, "golden", "found", lineterm="", n=2))
    cut = [f"... and {len(diff) - _DIFF_LINES} more lines of diff"] if len(diff) > _DIFF_LINES else []
    return ["what changed:", *(f"  {word}" for word in words), "", *diff[:_DIFF_LINES], *cut, "", f"to accept: {command}"]
