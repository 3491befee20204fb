"""Arguments that several commands have: the plan and the pass."""

from __future__ import annotations

from argparse import ArgumentParser

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.pass_names import no_pass

PLAN = "PLAN[::ROW]"
PLAN_HELP = (
    "plan file; ROW is the id of a [[matrix]] row, left out: the plan above the rows. FILE[ROW] and the node id of an "
    "item, as pytest prints it, mean the same"
)


def add_for_sides(parser: ArgumentParser, flag: str, dest: str, metavar: str, meaning: str) -> None:
    """Add an option that may be given twice, once for each of two sides."""
    parser.add_argument(flag, dest=dest, action="append", default=[], metavar=metavar, help=meaning)


def refuse_no_pass(name: str) -> None:
    """Raise UsageError unless ``name`` is written as a pass is."""
    if problem := no_pass(name):
        raise UsageError(f"--pass: {problem}")


def up_to_two(option: str, given: list[str]) -> list[str]:
    """What was given for both sides. Raises UsageError for more."""
    if len(given) > 2:
        raise UsageError(f"{option} is given {len(given)} times, and there are two sides")
    return given
