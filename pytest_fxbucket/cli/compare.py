"""``fxbucket compare REF [REF2]``: step time of two commits side by side on this machine, in turns."""

from __future__ import annotations

import json
import math
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack

from pytest_fxbucket.backends import CHOICES
from pytest_fxbucket.cli.apart import typed
from pytest_fxbucket.cli.asked import add_for_sides, refuse_no_pass, up_to_two
from pytest_fxbucket.cli.benchmarked import Named, named_plans
from pytest_fxbucket.cli.compared import SidesCompared
from pytest_fxbucket.cli.trees import Asked, CommitSide, CommitTree, plan_compared
from pytest_fxbucket.commit import Repository, stoppable
from pytest_fxbucket.errors import FxbucketError, UsageError
from pytest_fxbucket.progress import Progress

_NOT_SLOWER, _SLOWER, _UNTOLD = 0, 1, 2


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket compare``."""
    parser.add_argument("ref", metavar="REF", help="the commit to compare with")
    parser.add_argument("ref2", metavar="REF2", nargs="?", help="the commit to judge; left out: the working tree as it is")
    parser.add_argument(
        "--plan",
        dest="plans",
        action="append",
        default=[],
        metavar="PATH[::ROW]",
        help="plan file, or a folder: all plans below that have the benchmark on; repeatable; left out: ini fxbucket_plans",
    )
    parser.add_argument(
        "--threshold", metavar="F", help="fraction of the step; smaller differences are none (default: the plan's)"
    )
    parser.add_argument("--budget-s", metavar="S", help="seconds of steps for each plan (default: the plan's)")
    parser.add_argument(
        "--precision", metavar="F", help="half width of the interval at which it ends early (default: the plan's)"
    )
    parser.add_argument("--confidence", metavar="F", default="0.99", help="of the interval that tells a difference from noise")
    parser.add_argument("--variant", choices=("bucketed", "unbucketed"), default="bucketed", help="which step is timed")
    parser.add_argument("--backend", choices=CHOICES, help="process group back end instead of the plan's")
    add_for_sides(parser, "--pass", "passes", "PASS", "as for fxbucket diff; twice: one for each side")
    add_for_sides(parser, "--python", "pythons", "PATH", "interpreter of both sides; twice: one for each")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, with every sample")


def run(options: Namespace) -> int:
    """Print what is faster; gives 0 if the second side is not slower, 1 if it is, 2 if that could not be told."""
    try:
        with stoppable():
            return _compared(options)
    except FxbucketError as error:
        print(f"fxbucket: {error}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except Exception:  # Python's own status for it is 1, which means slower
        traceback.print_exc()
    return _UNTOLD


def _compared(options: Namespace) -> int:
    asked = _asked(options)
    passes, pythons = _two("--pass", options.passes, "manual"), _two("--python", options.pythons, sys.executable)
    for name in passes:
        refuse_no_pass(name)
    plans = named_plans(options.plans)
    repository = Repository.of(plans[0].file, "REF")
    commits = repository.commit(options.ref), repository.commit(options.ref2) if options.ref2 is not None else None
    found: list[SidesCompared] = []
    problems: list[str] = []
    with ExitStack() as stack:
        trees = [CommitTree.of(repository, commit, stack) for commit in commits]
        sides = [CommitSide(*one) for one in zip(trees, passes, pythons, strict=True)]
        for plan in plans:
            lacking = next((tree.label for tree in trees if plan.is_found and tree.lacks(plan)), None)
            if lacking is not None:
                print(f"fxbucket: {typed(plan.file, plan.row)} is passed over, since it is not in {lacking}", file=sys.stderr)
                continue
            try:
                found.append(_one(plan, sides, asked))
            except FxbucketError as error:
                problems.append(str(error))
                print(f"fxbucket: {error}", file=sys.stderr, flush=True)
                continue
            if not options.json:
                print("\n".join(found[-1].lines()), flush=True)
    if options.json:
        print(json.dumps({"format": 1, "plans": [one.plain() for one in found], "problems": problems}, indent=1))
    if commits[1] is not None and commits[0].sha == commits[1].sha:
        print("both sides are one commit: what is seen is noise", file=sys.stderr)
    if any(one.verdict == "slower" for one in found):
        return _SLOWER
    return _UNTOLD if problems or not found else _NOT_SLOWER


def _one(plan: Named, sides: Sequence[CommitSide], asked: Asked) -> SidesCompared:
    progress = Progress(lambda line: print(line, file=sys.stderr, flush=True))
    with progress.watching(typed(plan.file, plan.row)):
        return plan_compared(plan, sides, asked, progress.say)


def _asked(options: Namespace) -> Asked:
    fraction = "a fraction of the step below 1, such as 0.03 for 3 %"
    limits = {"threshold": (0.0, 1.0, fraction), "precision": (0.0, 1.0, fraction), "budget_s": (0.0, math.inf, "seconds")}
    given = {name: getattr(options, name) for name in limits}
    numbers = {name: _number(name, text, *limits[name]) for name, text in given.items() if text is not None}
    confidence = _number("confidence", options.confidence, 0.5, 1.0, "a number from 0.5 to 1, such as 0.99")
    return Asked(options.variant, options.backend, confidence, numbers)


def _number(name: str, text: str, low: float, high: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value < high:
        raise UsageError(f"--{name.replace('_', '-')} {text}: expected {expected}")
    return value


def _two(option: str, given: list[str], default: str) -> tuple[str, str]:
    both = up_to_two(option, given) or [default]
    return both[0], both[-1]
