"""``fxbucket mutate PLAN``: how many broken graphs the checks of a plan find, and which they do not."""

from __future__ import annotations

import math
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.common import (
    add_json,
    add_pass,
    add_plan,
    name_of,
    print_json,
    refuse_no_pass,
    refuse_not_above,
    working_on,
)
from pytest_fxbucket.cli.ctrl_c import STOPPED
from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.plan.folders import root_of

if TYPE_CHECKING:
    from pytest_fxbucket.mutate.score import Judged, MutationScore
    from pytest_fxbucket.plan.schema import Plan

_AT_MOST = 100
_SHOWN_AFTER_S = 0.5
_WIDTH = 160


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket mutate``."""
    add_plan(parser)
    add_pass(parser)
    parser.add_argument(
        "--operators",
        default="",
        metavar="NAMES",
        help="which, with commas between them; module:callable for one of your own (default: all of fxbucket's)",
    )
    parser.add_argument(
        "--at-most", type=int, default=_AT_MOST, metavar="N", help=f"mutants, operators taking turns (default: {_AT_MOST})"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S", help="after which no more are made (default: no limit)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="gives the places that are broken (default: 0)")
    parser.add_argument("-n", type=int, default=1, metavar="N", dest="workers", help="processes, each with ranks (default: 1)")
    add_json(parser)


def run(options: Namespace) -> int:
    """Print the score; gives 0, or 1 if a mutant survived, 130 if Ctrl-C ended it, behind what was found so far."""
    refuse_no_pass(options.pass_name)
    for option, value in (("--at-most", options.at_most), ("-n", options.workers)):
        if value < 1:
            raise UsageError(f"{option} {value}: expected a whole number of at least 1")
    refuse_not_above(0, "--seconds", options.seconds)
    plan, _ = find_plan(options.plan)
    score: MutationScore | None = None
    stopped = False
    try:
        # Ctrl-C ends the search and not the command: the last score is what was found so far.
        for so_far in _scores(plan, options):
            score = so_far
    except KeyboardInterrupt:
        stopped = True
    if score is None:
        print(f"fxbucket: {'stopped before a mutant was judged' if stopped else 'nothing can be broken'}", file=sys.stderr)
        return STOPPED if stopped else 1
    if options.json:
        print_json(_document(plan, score, options.seed, stopped))
    else:
        for line in _lines(plan, score, stopped):
            print(line)
    return STOPPED if stopped else int(bool(score.of("survived")) or not score.counted_mutants)


def _scores(plan: Plan, options: Namespace) -> Iterator[MutationScore]:
    from pytest_fxbucket.cli.mutation_workers import scored_by_workers
    from pytest_fxbucket.mutate.judge import MutantSelection
    from pytest_fxbucket.mutate.registry import operators_of
    from pytest_fxbucket.settings import RunSettings

    names = tuple(name.strip() for name in options.operators.split(",") if name.strip())
    asked = MutantSelection(names, options.seed, options.at_most, options.seconds)
    root = root_of(plan.path)
    with tempfile.TemporaryDirectory() as folder, working_on(plan, name_of(plan), _SHOWN_AFTER_S) as say:
        # For its errors alone: a name that is wrong is told before anything is captured or a worker started.
        operators_of(names)
        settings = RunSettings(root, root / "golden", Path(folder), options.pass_name)
        yield from scored_by_workers(plan, settings, asked, options.workers, say)


# For people.


def _lines(plan: Plan, score: MutationScore, stopped: bool) -> Iterator[str]:
    from pytest_fxbucket.mutate.score import sums, survivor_lines, undecided_lines

    width = max(len("operator"), *(len(name) for name in score.by_operator()))
    yield f"{'operator':<{width}}{'found':>8}{'survived':>10}{'equivalent':>12}{'undecided':>11}"
    for name, fates in score.by_operator().items():
        if fates.total() > fates["unmade"]:
            numbers = f"{fates['found']:>8}{fates['survived']:>10}{fates['equivalent']:>12}{fates['undecided']:>11}"
            yield f"{name:<{width}}{numbers}"
    yield ""
    yield "found by " + (", ".join(f"{name} {count}" for name, count in score.by_check().items()) or "nobody")
    for one in score.of("survived"):
        yield ""
        yield from survivor_lines(one)
        yield from (f"    {line[:_WIDTH]}" for line in one.diff)
    for one in score.judged:
        yield from undecided_lines(one)
    for one in score.of("unmade"):
        yield f"not made: {one.unmade}"
    yield ""
    some = "stopped: " if stopped else ""
    yield f"{some}{name_of(plan)}: {sums(score)}; {len(score.judged)} of {score.possible} places"


# For programs.


def _document(plan: Plan, score: MutationScore, seed: int, stopped: bool) -> dict[str, Any]:
    alone, of = score.without_golden
    return {
        "plan": str(plan.path),
        "row": plan.matrix_id,
        "seed": seed,
        "places": score.possible,
        "judged": len(score.judged),
        "found": score.found_count,
        "survived": len(score.of("survived")),
        "equivalent": len(score.of("equivalent")),
        "undecided": len(score.of("undecided")),
        "score": score.share,
        "without_golden": {"found": alone, "of": of},
        "by_check": score.by_check(),
        "ended": "stopped" if stopped else "done",
        "mutants": [_mutant(one) for one in score.judged],
    }


def _mutant(one: Judged) -> dict[str, Any]:
    mutant = one.mutant
    return {
        "operator": mutant.operator,
        "phase": mutant.phase,
        "node": mutant.site.node,
        "how": mutant.site.how,
        "rank": "last" if mutant.site.on_last_rank else None,
        "fate": one.fate,
        "found": dict(one.found),
        "undecided": dict(one.undecided),
        "values_equal": one.equal,
        "why": one.harmless or one.unmade or None,
        "diff": list(one.diff),
    }
