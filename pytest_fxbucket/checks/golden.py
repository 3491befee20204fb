"""The check ``golden``: is the schedule still the reviewed one?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.checks.verdict import Verdict, failed, passed
from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.golden.accept import accepts
from pytest_fxbucket.golden.mismatch import mismatch_lines
from pytest_fxbucket.golden.store import GoldenStore, render
from pytest_fxbucket.plan_on_mesh import text_of

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context


def run(context: Context) -> Verdict:
    """Compare the schedule, which must be one on all ranks, with the reviewed one. Raises GoldenError where there is none."""
    store = GoldenStore(context.settings.golden_dir, context.settings.rootdir)
    path = store.path_for(context.plan.path, context.plan.matrix_id)
    world = context.world
    text = text_of(world, 0, context.name)
    for rank in (ranks[0] for ranks, _ in world.distinct()):
        other = text_of(world, rank, context.name)
        if other != text:
            never = "nothing: a schedule must be the same on every rank"
            lines = mismatch_lines(text, other, never, context.folder.file("golden.diff"))
            return failed("golden", f"the schedule of rank {rank} is not that of rank 0", lines)
    # The schedule of a pass that is not the plan's own is compared with the golden, and never written over it.
    ours = world.pass_name == context.plan.pass_name
    may_write = ours and context.accept_golden is not None and accepts(context.settings.accept, path)
    context.on_compare(path)
    try:
        accepted = store.read(path)
    except GoldenError:
        if not may_write:
            raise
        accepted = None
    if accepted == text:
        return passed("golden", f"as in {store.shown(path)}")
    if may_write and context.accept_golden is not None:
        context.accept_golden(path, render(text))
        return passed("golden", f"to be written to {store.shown(path)} when the run ends")
    assert accepted is not None
    command = store.accept_command(path) if ours else "nothing: a golden belongs to the plan, not to another pass"
    lines = mismatch_lines(accepted, text, command, context.folder.file("golden.diff"))
    context.folder.write("found.txt", text)
    return failed("golden", f"the schedule is not the one in {store.shown(path)}", lines)
