"""``fxbucket show PLAN``: the schedule as the plan's golden has it, or every node of its graphs; without ranks."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.cli.asked import PLAN, PLAN_HELP, refuse_no_pass
from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.explain.find import find_plan, root_of
from pytest_fxbucket.progress import Progress
from pytest_fxbucket.user_code import user_code

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh

Told = Callable[["PlanOnMesh", int, str], str]
"""From a plan in its world, the rank and the plan's name to what is told of it."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket show``."""
    parser.add_argument("plan", metavar=PLAN, help=PLAN_HELP)
    parser.add_argument("--full", action="store_true", help="every node of the graphs, in order, instead of the schedule")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="as rank R of the mesh has it (default: 0)")
    parser.add_argument(
        "--pass", dest="pass_name", default="manual", metavar="PASS", help="manual (the default), torch or module:callable"
    )


def run(options: Namespace) -> int:
    """Print the text; raises FxbucketError, and then nothing is on stdout."""
    refuse_no_pass(options.pass_name)
    plan, rows = find_plan(options.plan)
    text = tell(plan, options.pass_name, full_text if options.full else golden_file, options.rank)
    sys.stdout.write(text)
    if rows and plan.matrix_id is None:
        print(f"this is the plan above its [[matrix]] rows; a row is shown as {plan.path}::{rows[0]}", file=sys.stderr)
    return 0


def tell(plan: Plan, pass_name: str, told: Told, rank: int = 0) -> str:
    """What ``told`` gives of ``plan`` after the pass, its folders on the path; stdout stays clean, progress is on stderr.

    Raises UsageError for a rank that the mesh does not have, and what capture and passes raise.
    """
    if not 0 <= rank < plan.world_size:
        raise UsageError(f"--rank {rank} is not there; {plan.path} has ranks 0 to {plan.world_size - 1}")
    progress = Progress(lambda line: print(line, file=sys.stderr, flush=True))
    # A model that prints while it is built must not print into the text.
    with redirect_stdout(sys.stderr), user_code(folders_of(plan)), progress.watching(name_of(plan)):
        from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of

        return told(PlanOnMesh(plan, mesh_of(plan), pass_name, progress.say), rank, name_of(plan))


def folders_of(plan: Plan) -> list[Path]:
    """Folders that are first on the path while the plan's callables are imported."""
    return [plan.path.resolve().parent, root_of(plan.path)]


def name_of(plan: Plan) -> str:
    """Path of the plan from its root, with the matrix id, as goldens and items name it."""
    shown = Path(os.path.relpath(plan.path.resolve(), root_of(plan.path))).as_posix()
    return f"{shown}[{plan.matrix_id}]" if plan.matrix_id else shown


def golden_file(world: PlanOnMesh, rank: int, name: str) -> str:
    """The plan's golden, the whole file, as it is on ``rank``."""
    from pytest_fxbucket.golden.store import render
    from pytest_fxbucket.plan_on_mesh import text_of

    return render(text_of(world, rank, name))


def full_text(world: PlanOnMesh, rank: int, name: str) -> str:
    """Every node of the graphs that came out of the pass, as ``rank`` has them."""
    from pytest_fxbucket.golden.schedule import named_buckets
    from pytest_fxbucket.graph.listing import listing, notes_of
    from pytest_fxbucket.passes.keep_order import without_kept_order

    mesh = " ".join(f"{dim.name}={dim.size}" for dim in world.step(0).mesh)
    lines = [f"plan {name}", f"mesh {mesh}"]
    for phase, one in world.final(rank).items():
        graph = one.bucketed.graph
        dims = world.dims_of(graph)
        labels = {node: bucket.label for node, bucket in named_buckets(one.reading, world.entry_of, dims)}
        notes = notes_of(without_kept_order(graph), labels)
        inputs = world.final_step(rank).inputs[phase]
        lines += ["", f"graph {phase}", "", *listing(graph, one.bucketed.root, inputs=inputs, notes=notes, dims_of=dims)]
    return "\n".join(lines) + "\n"
