"""``fxbucket diff A [B]``: how the schedules of two plans, two passes or two commits differ; without ranks."""

from __future__ import annotations

import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.cli.asked import PLAN_HELP, add_for_sides, refuse_no_pass, up_to_two
from pytest_fxbucket.cli.sides import AtCommit, DiffSide, InTree, same_name
from pytest_fxbucket.commit import stoppable
from pytest_fxbucket.errors import FxbucketError, UsageError
from pytest_fxbucket.explain.find import parts, root_of

_SAME, _DIFFERENT, _FAILED = 0, 1, 2


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket diff``."""
    parser.add_argument("a", metavar="A[::ROW]", help=PLAN_HELP)
    parser.add_argument("b", metavar="B[::ROW]", nargs="?", help="the plan to compare it with; left out: A itself")
    add_for_sides(
        parser,
        "--pass",
        "passes",
        "PASS",
        "manual (the default), torch or module:callable, for both sides; given twice, the second is for the second side",
    )
    add_for_sides(
        parser,
        "--at",
        "revs",
        "REV",
        "the first side as it was at a commit, the second as it is now; given twice, each at its own",
    )


def run(options: Namespace) -> int:
    """Print what changed; gives 0 for the same schedule, 1 for another one, 2 if that could not be told."""
    try:
        with stoppable():
            return _compared(options)
    except FxbucketError as error:
        print(f"fxbucket: {error}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except Exception:  # Python's own status for it is 1, which means that schedules differ
        traceback.print_exc()
    return _FAILED


def _compared(options: Namespace) -> int:
    a, b = _sides(options)
    old, new = same_name(a.schedule()), same_name(b.schedule())
    if old == new:
        print("same")
        return _SAME
    passes = [f" by pass {side.pass_name}" if a.pass_name != b.pass_name else "" for side in (a, b)]
    for line in _changes(old, new, (a.label + passes[0], b.label + passes[1]), _folder(options.a)):
        print(line)
    return _DIFFERENT


def _changes(old: str, new: str, names: tuple[str, str], folder: Folder) -> list[str]:
    """Words and diff; the whole of a long one in a file, if one can be written at all."""
    from pytest_fxbucket.golden.mismatch import change_lines

    try:
        whole = folder.make() / "whole.diff"
    except OSError:
        return change_lines(old, new, names)
    lines = change_lines(old, new, names, whole)
    if not whole.exists():
        folder.clear()
    return lines


def _folder(plan: str) -> Folder:
    file, row = parts(plan)
    root = root_of(file)
    return Folder(root / ".fxbucket", f"{os.path.relpath(file.resolve(), root)} {row or ''}", "diff")


def _sides(options: Namespace) -> tuple[DiffSide, DiffSide]:
    """Both sides, so far as they can be known before either is traced. Raises UsageError if they are one and the same."""
    for name in options.passes:
        refuse_no_pass(name)
    passes, revs = up_to_two("--pass", options.passes), up_to_two("--at", options.revs)
    passes = passes or ["manual"]
    a = _side(options.a, passes[0], revs[0] if revs else None)
    b = _side(options.b or options.a, passes[-1], revs[1] if len(revs) == 2 else None)
    if a.what == b.what:
        raise UsageError(
            f"there is nothing to compare: both sides are {a.label} by pass {a.pass_name}; give a second plan, --pass twice, "
            "or --at with the commit to compare with"
        )
    if isinstance(a, InTree) and isinstance(b, InTree) and a.folders != b.folders:
        b = replace(b, apart=True)  # modules of one name may be others there
    return a, b


def _side(plan: str, pass_name: str, rev: str | None) -> DiffSide:
    return InTree.of(plan, pass_name) if rev is None else AtCommit.of(plan, pass_name, rev)
