"""Arguments that several commands have: the plan and the pass."""

from __future__ import annotations

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.pass_names import no_pass

PLAN = "PLAN[::ROW]"
PLAN_HELP = (
    "plan file; ROW is the id of a [[matrix]] row, left out: the plan above the rows. FILE[ROW] and the node id of an "
    "item, as pytest prints it, mean the same"
)


def refuse_no_pass(name: str) -> None:
    """Raise UsageError unless ``name`` is written as a pass is."""
    if problem := no_pass(name):
        raise UsageError(f"--pass: {problem}")


def up_to_two(option: str, given: list[str]) -> list[str]:
    """What was given for both sides. Raises UsageError for more."""
    if len(given) > 2:
        raise UsageError(f"{option} is given {len(given)} times, and there are two sides")
    return given
