"""``fxbucket show PLAN``: the schedule as the plan's golden has it, or every node of its graphs; without ranks."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_fxbucket.cli.common import add_pass, add_plan, name_of, refuse_no_pass, working_on
from pytest_fxbucket.cli.output import write_utf8
from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.explain.find import find_plan

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh

TextOf = Callable[["PlanOnMesh", int, str], str]
"""From a plan in its world, the rank and the plan's name to what is shown of it."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket show``."""
    add_plan(parser)
    parser.add_argument("--full", action="store_true", help="every node of the graphs, in order, instead of the schedule")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="as rank R of the mesh has it (default: 0)")
    add_pass(parser)


def run(options: Namespace) -> int:
    """Print the text; raises FxbucketError, and then nothing is on stdout."""
    refuse_no_pass(options.pass_name)
    plan, rows = find_plan(options.plan)
    name = options.pass_name or plan.pass_name
    write_utf8(shown(plan, name, full_text if options.full else golden_file, options.rank))
    if rows and plan.matrix_id is None:
        print(f"this is the plan above its [[matrix]] rows; a row is shown as {plan.path}::{rows[0]}", file=sys.stderr)
    return 0


def shown(plan: Plan, pass_name: str, text_of: TextOf, rank: int = 0) -> str:
    """What ``text_of`` gives of ``plan`` after the pass.

    Raises UsageError for a rank that the mesh does not have, and what capture and passes raise.
    """
    if not 0 <= rank < plan.world_size:
        raise UsageError(f"--rank {rank} is not there; {plan.path} has ranks 0 to {plan.world_size - 1}")
    name = name_of(plan)
    with working_on(plan, name) as say:
        from pytest_fxbucket.captured_plan import CapturedPlan
        from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of

        return text_of(PlanOnMesh(CapturedPlan(plan, mesh_of(plan), say), pass_name), rank, name)


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
        labels = {node: bucket.label for node, bucket in named_buckets(one.reading.buckets, world.entry_of, dims)}
        notes = notes_of(without_kept_order(graph), labels)
        inputs = world.final_step(rank).inputs[phase]
        lines += ["", f"graph {phase}", "", *listing(graph, one.bucketed.root, inputs=inputs, notes=notes, dims_of=dims)]
    return "\n".join(lines) + "\n"
