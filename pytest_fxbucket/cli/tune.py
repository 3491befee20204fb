"""``fxbucket tune PLAN``: a better plan, found on a simulated cluster, as a diff to be reviewed; without ranks."""

from __future__ import annotations

import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.cluster_options import add_cluster, cluster_asked, ms, on_world
from pytest_fxbucket.cli.common import (
    above_rows,
    add_json,
    add_plan,
    checking,
    name_of,
    print_json,
    refuse_not_above,
    working_on,
)
from pytest_fxbucket.cli.ctrl_c import STOPPED
from pytest_fxbucket.errors import FxbucketError, UsageError
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.files import write_whole
from pytest_fxbucket.words import counted, human_bytes

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.tune.proposal import Proposal
    from pytest_fxbucket.tune.search import BestPlan, SimulatedScore

_GIB = 1 << 30
_SECONDS = 110.0
_SHOWN_AFTER_S = 0.2
"""Short, so that each simulated plan is told: one takes a second, but all of them take long."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket tune``."""
    add_plan(parser)
    add_cluster(parser)
    parser.add_argument(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="most that a rank may hold at once, in 2**30 bytes; left out: [checks] memory's limits, or the cluster's memory",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=_SECONDS,
        metavar="S",
        help=f"how long it may take, with tracing; the plan as it is is simulated in any case (default: {_SECONDS:g})",
    )
    parser.add_argument("--write", action="store_true", help="put the plan that is proposed into the file")
    add_json(parser)


def run(options: Namespace) -> int:
    """Search and tell; gives 130 if Ctrl-C ended the search, and then the best so far is told and nothing written."""
    begin = time.monotonic()
    _refuse_limits(options)
    plan, rows = find_plan(options.plan)
    if plan.model is None:
        raise UsageError(f"{plan.path} has [graph], and what is searched is what a [model] traces")
    if options.write and plan.matrix_id is not None:
        raise UsageError(
            f'{plan.path}: --write puts keys into the plan, and those of row "{plan.matrix_id}" stand over it; '
            "leave --write out, and write them into the row by hand"
        )
    # Read before the search, so that --write sees whether somebody changed the file meanwhile.
    text = _text(plan)
    asked, name = on_world(plan, options.world), name_of(plan)
    cluster = cluster_asked(plan, options.cluster)
    try:
        with working_on(plan, name, _SHOWN_AFTER_S) as say:
            from pytest_fxbucket.tune.score import PlanSimulator
            from pytest_fxbucket.tune.search import search

            scorer = PlanSimulator(asked, cluster, say)
            limit = scorer.limit() if options.memory_gb is None else options.memory_gb * _GIB
            found = search(asked, scorer, limit, lambda: options.seconds - (time.monotonic() - begin), say)
    except KeyboardInterrupt:
        print("fxbucket: stopped before the plan as it is was simulated", file=sys.stderr)
        return STOPPED

    from pytest_fxbucket.tune.proposal import proposal_of

    proposal = proposal_of(text, asked, found.plan, scorer.agree)
    writes = options.write and found.ended != "stopped" and not proposal.problem and proposal.new != text
    if writes:
        _write(plan, text, proposal.new)
    if options.json:
        print_json(_document(plan, rows, cluster, found, proposal, writes))
    else:
        for line in _lines(plan, rows, name, cluster, found, proposal, writes):
            print(line)
    # Last, so that the proposal is printed all the same.
    if options.write and proposal.problem:
        raise FxbucketError(f"nothing is written: {proposal.problem}")
    return STOPPED if found.ended == "stopped" else 0


def _refuse_limits(options: Namespace) -> None:
    for option in ("seconds", "memory_gb"):
        if (value := getattr(options, option)) is not None:
            refuse_not_above(0, f"--{option.replace('_', '-')}", value)
    if options.memory_gb is not None and math.isinf(options.memory_gb * _GIB):  # of which JSON has no number
        raise UsageError(f"--memory-gb {options.memory_gb:g}: expected a finite number")


def _text(plan: Plan) -> str:
    """The file, with its own line ends."""
    return plan.path.read_bytes().decode("utf-8-sig")


def _write(plan: Plan, old: str, new: str) -> None:
    """Raises FxbucketError if the file is not as it was when the search began, or cannot be written."""
    try:
        if _text(plan) != old:
            raise FxbucketError(f"{plan.path} was changed while the search ran, so nothing is written; run it again")
        # _text leaves out a byte order mark, so it is put back.
        mark = "\ufeff" if plan.path.read_bytes().startswith(b"\xef\xbb\xbf") else ""
        write_whole(plan.path.resolve(), mark + new)  # a link stays one
    except OSError as error:
        raise FxbucketError(f"{plan.path} cannot be written: {error.strerror or error}") from error


# For people.


def _lines(
    plan: Plan, rows: list[str], name: str, cluster: Cluster, found: BestPlan, proposal: Proposal, written: bool
) -> Iterator[str]:
    ranks = counted(found.plan.world_size, "rank")
    yield f"{name}: {ranks} on {cluster.name}, of whose memory {human_bytes(found.limit)} may be held"
    yield ""
    yield from _sums(found.first, found.score, bool(found.changes))
    yield ""
    yield f"{_tried(found)}; {_ENDED[found.ended]}"
    if found.score.peak_bytes > found.limit:
        yield f"none of them fits into {human_bytes(found.limit)}"
    if not found.changes:
        yield "nothing found that is better than the plan as it is"
    else:
        yield from _changes(found)
        yield ""
        yield from proposal.diff.splitlines()
        yield ""
        if proposal.problem:
            yield proposal.problem
        command = checking(plan.path)
        if written:
            yield f"written to {plan.path}; goldens and checks decide: {command}"
        elif found.ended == "stopped":
            yield "stopped: this is the best so far, and nothing is written"
        else:
            yield f"this is a proposal: goldens and checks decide, once it is in the file: {command}"
    yield from above_rows(plan, rows, "a row is tuned")


_ENDED = {
    "": "nothing is left to try",
    "time": "the time was over before all were tried, more has --seconds",
    "stopped": "the search was stopped",
}


def _tried(found: BestPlan) -> str:
    refused = f", and {counted(found.refused, 'other')} refused by the model or the pass" if found.refused else ""
    return f"{counted(found.tried, 'other plan')} simulated{refused}"


def _sums(before: SimulatedScore, after: SimulatedScore, proposed: bool) -> Iterator[str]:
    sides = (before, after) if proposed else (before,)
    rows = [
        ("", ("as it is", "proposed")),
        ("step", [f"{ms(one.seconds)} ms" for one in sides]),
        ("exposed", [f"{ms(one.exposed)} ms" for one in sides]),
        ("peak memory", [human_bytes(one.peak_bytes) for one in sides]),
    ]
    for label, cells in rows:
        yield f"{label:<12}" + "".join(f"{cell:>16}" for cell, _ in zip(cells, sides, strict=False))


def _changes(found: BestPlan) -> Iterator[str]:
    width = max(len("change"), *(len(one.says) for one in found.changes))
    yield f"\n{'change':<{width + 2}}{'gain ms':>12}{'then step ms':>14}{'peak memory':>14}"
    for one in found.changes:
        row = f"{ms(one.gain):>12}{ms(one.score.seconds):>14}{human_bytes(one.score.peak_bytes):>14}"
        yield f"{one.says:<{width + 2}}{row}"


# For programs.


def _document(
    plan: Plan, rows: list[str], cluster: Cluster, found: BestPlan, proposal: Proposal, written: bool
) -> dict[str, Any]:
    """Times in seconds, sizes in bytes."""
    return {
        "plan": str(plan.path),
        "row": plan.matrix_id,
        "rows": rows,
        "cluster": cluster.name,
        "mesh": found.plan.degrees,
        "memory_limit": found.limit,
        "as_it_is": _score(found.first),
        "proposed": _score(found.score) if found.changes else None,
        "changes": [{"what": one.says, "gain": one.gain, **_score(one.score)} for one in found.changes],
        "simulated": found.tried,
        "refused": found.refused,
        "ended": found.ended or "done",
        "diff": proposal.diff,
        "problem": proposal.problem or None,
        "written": written,
    }


def _score(score: SimulatedScore) -> dict[str, Any]:
    return {"seconds": score.seconds, "exposed": score.exposed, "peak_bytes": score.peak_bytes}
