"""What several commands share: arguments, where a plan's code is found, and exit codes that have a meaning."""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.commit import stoppable
from pytest_fxbucket.errors import FxbucketError, UsageError
from pytest_fxbucket.pass_names import no_pass
from pytest_fxbucket.plan.folders import folders_of, root_of
from pytest_fxbucket.progress import AFTER_S, on_stderr
from pytest_fxbucket.user_code import user_code

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan

PLAN_HELP = (
    "plan file; ROW is the id of a [[matrix]] row, left out: the plan above the rows. FILE[ROW] and the node id of an "
    "item, as pytest prints it, mean the same"
)


def add_plan(parser: ArgumentParser) -> None:
    """Add the plan that a command is about."""
    parser.add_argument("plan", metavar="PLAN[::ROW]", help=PLAN_HELP)


def add_pass(parser: ArgumentParser, more: str = "") -> None:
    """Add the pass; ``more`` is what else the help says."""
    meaning = f"manual, torch or module:callable, or several parted by commas; left out: the plan's own{more}"
    parser.add_argument("--pass", dest="pass_name", metavar="PASS", help=meaning)


def add_json(parser: ArgumentParser) -> None:
    """Add the option that :func:`print_json` is for."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, as the docs describe it")


def print_json(document: Mapping[str, Any]) -> None:
    """Print ``document``, which is all of stdout."""
    print(json.dumps(document, indent=2, sort_keys=True))


def add_for_sides(parser: ArgumentParser, flag: str, dest: str, metavar: str, meaning: str) -> None:
    """Add an option that may be given twice, once for each of two sides."""
    parser.add_argument(flag, dest=dest, action="append", default=[], metavar=metavar, help=meaning)


def refuse_no_pass(*names: str | None) -> None:
    """Raise UsageError unless all of ``names`` are written as passes are; None is the plan's own."""
    for name in filter(None, names):
        if problem := no_pass(name):
            raise UsageError(f"--pass: {problem}")


def up_to_two(option: str, given: list[str]) -> list[str]:
    """What was given for both sides. Raises UsageError for more."""
    if len(given) > 2:
        raise UsageError(f"{option} is given {len(given)} times, and there are two sides")
    return given


def typed(path: Path | PurePosixPath, row: str | None) -> str:
    """A plan as it is typed."""
    return f"{path}::{row}" if row else str(path)


def above_rows(plan: Plan, rows: Sequence[str], how: str) -> list[str]:
    """The sentence that names the [[matrix]] ``rows`` of a plan given without one; nothing without rows.

    ``how`` begins what it says of them, as in "a row is told".
    """
    if not rows or plan.matrix_id is not None:
        return []
    return [f"this is the plan above its [[matrix]] rows; {how} as {typed(plan.path, rows[0])}: {', '.join(rows)}"]


def name_of(plan: Plan) -> str:
    """Path of the plan from its root, with the matrix id, as goldens and items name it."""
    shown = Path(os.path.relpath(plan.path.resolve(), root_of(plan.path))).as_posix()
    return f"{shown}[{plan.matrix_id}]" if plan.matrix_id else shown


def refuse_not_above(least: int, option: str, value: float) -> None:
    """Raise UsageError unless the ``value`` of ``option`` is a number above ``least``."""
    if not value > least:  # as no comparison with nan is
        raise UsageError(f"{option} {value:g}: expected a number above {least}")


@contextmanager
def working_on(plan: Plan, name: str, after_s: float = AFTER_S) -> Iterator[Callable[[str], None]]:
    """Have the plan's folders on the path; gives a function that tells the user, under ``name``, what is waited for.

    Waits shorter than ``after_s`` are not told. All of it goes to stderr, and so does what a model prints while it is built:
    stdout has only what the command is asked for.
    """
    progress = on_stderr(after_s)
    with redirect_stdout(sys.stderr), user_code(folders_of(plan.path)), progress.watching(name):
        yield progress.say


def status_of(work: Callable[[], int], failed: int) -> int:
    """The status that ``work`` gives; ``failed`` if it ends in an error, which goes to stderr. Signals unwind ``work``.

    Python's own status for a traceback is 1, which means here that two sides differ.
    """
    try:
        with stoppable():
            return work()
    except FxbucketError as error:
        print(f"fxbucket: {error}", file=sys.stderr)
    except BrokenPipeError:
        # A reader who is gone, as behind ``| head``, is no failed comparison: the command ends quietly.
        raise
    except Exception:
        traceback.print_exc()
    return failed


def checking(path: Path) -> str:
    """The command that runs all checks of a plan file."""
    # A list of plans is split at commas; as an argument of its own the file is found, too.
    asked = str(path) if "," in str(path) else f"--fxbucket-plans={path}"
    return shlex.join(["pytest", asked])
