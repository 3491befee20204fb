"""``fxbucket explain PLAN``: what the pass makes of a plan, bucket by bucket, and why; without ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.common import above_rows, add_json, add_pass, add_plan, print_json, refuse_no_pass, working_on
from pytest_fxbucket.explain.find import find_parameters, find_plan

if TYPE_CHECKING:
    from pytest_fxbucket.explain.report import Explanation


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket explain``."""
    add_plan(parser)
    parser.add_argument(
        "--why",
        metavar="PARAMETER",
        help="say of one parameter why it is in the bucket that it is in: an FQN, the end of one, or a glob",
    )
    add_json(parser)
    add_pass(parser, "; of a pass that gives no report, what its graph has is told")


def run(options: Namespace) -> int:
    """Trace the plan's step, run the pass, and tell; raises FxbucketError, and then nothing is on stdout."""
    refuse_no_pass(options.pass_name)
    plan, rows = find_plan(options.plan)
    name = options.pass_name or plan.pass_name
    shown = str(plan.path) + (f"[{plan.matrix_id}]" if plan.matrix_id else "")
    with working_on(plan, shown) as say:
        # Here, since it imports torch, which --help must not wait for.
        from pytest_fxbucket.explain.report import explanation_of

        found = explanation_of(plan, name, say)
    document, lines = _why(found, options.why) if options.why else _all(found, shown)
    if options.json:
        head = {"plan": str(plan.path), "row": plan.matrix_id, "rows": rows, "pass": name, "ranks": plan.world_size}
        said_by = "pass" if found.by_report else "graph"
        print_json({**head, "said_by": said_by, **document})
        return 0
    for line in lines:
        print(line)
    for line in [] if options.why else above_rows(plan, rows, "those are explained"):
        print(f"\n{line}")
    return 0


def _all(found: Explanation, shown: str) -> tuple[dict[str, Any], list[str]]:
    from pytest_fxbucket.explain.report import graph_as_data
    from pytest_fxbucket.explain.text import explained

    entries: dict[str, list[str]] = {}
    for fqn, entry in found.entry_of.items():
        entries.setdefault(entry, []).append(fqn)
    graphs = {graph.phase: graph_as_data(graph) for graph in found.graphs}
    transformations = [asdict(one) for one in found.transformations]
    cluster = found.simulation.cluster if found.simulation is not None else None
    document = {"entries": entries, "graphs": graphs, "transformations": transformations, "cluster": cluster}
    return document, list(explained(found, shown))


def _why(found: Explanation, asked: str) -> tuple[dict[str, Any], list[str]]:
    from pytest_fxbucket.explain.why import answered, why

    answers = [why(found, parameter) for parameter in find_parameters(asked, found.parameters)]
    return {"why": [asdict(one) for one in answers]}, list(answered(answers))
