"""Finds the first of several passes behind which a check is red, by running the check behind the first one, two, ... passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.verdict import Verdict, failed
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.pass_names import in_order, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.checks.registry import Check
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh


def told_by_pass(check: Check, context: Context, verdict: Verdict) -> Verdict:
    """The red ``verdict`` with a line that names the first pass behind which it is red; of one pass as it is.

    The graphs before and behind that pass are written beside those of the failure.
    """
    world = context.run_world if check.on_ranks else context.world
    names = in_order(world.pass_name)
    if len(names) < 2 or not check.is_of_pass:
        return verdict
    context.say(f"looking for the pass behind which {check.name} is red")
    number = first_red(len(names), verdict, lambda count: _behind(check, context, listed(names[:count])))
    if not number:
        line = (
            f"{check.name} is red before the first of the {len(names)} passes already, and says the same: none of them mends it"
        )
        return replace(verdict, lines=(*verdict.lines, line))
    files = _written(context, *(world.by_pass(listed(names[:count])) for count in (number - 1, number)))
    line = (
        f"the first of {len(names)} passes behind which {check.name} is red is number {number}, {names[number - 1]}; graphs "
        f"before and behind it: {', '.join(files)}"
    )
    return replace(verdict, lines=(*verdict.lines, line))


def first_red(passes: int, final: Verdict, behind: Callable[[int], Verdict]) -> int:
    """The number, from 1, of the first of ``passes`` passes behind which the check is red; 0 if all of it was red before.

    ``behind(n)`` gives the verdict behind the first n passes. A check can be red before any pass for another reason, as an
    audit of a graph that is not bucketed yet. Then the first pass counts behind which a line of ``final`` appears that the
    verdict before all passes did not have.
    """
    start = behind(0)
    at_first = set(start.lines) if start.outcome == "failed" else set[str]()
    if not (last := set(final.lines) - at_first):
        return 0
    # Behind all of them the verdict is ``final``: if none before was red, the last pass is the one, without a run.
    for count in range(1, passes):
        verdict = behind(count)
        if verdict.outcome == "failed" and (not at_first or last & set(verdict.lines)):
            return count
    return passes


def _behind(check: Check, context: Context, pass_name: str) -> Verdict:
    """The check's verdict with only ``pass_name`` run; a failed one if the check cannot look at the result."""
    world = context.world.by_pass(pass_name)
    # Where both meshes are equal they are one world here too, so that its graphs are made and read once.
    same = context.run_world is context.world
    run_world = world if same or not check.on_ranks else context.run_world.by_pass(pass_name)
    folder = context.folder.beside("behind")
    asked = replace(
        context,
        world=world,
        on_ranks=lambda: run_world,
        folder=folder,
        accept_golden=None,
        on_compare=lambda _: None,
        briefly=True,
    )
    try:
        return check.run(asked)
    except FxbucketError as error:
        return failed(check.name, str(error), [str(error)])
    finally:
        folder.clear()


def _written(context: Context, before: PlanOnMesh, behind: PlanOnMesh) -> Sequence[str]:
    files = []
    for ranks, _ in behind.distinct():
        for name, world in (("before", before), ("behind", behind)):
            for phase, one in world.passed(ranks[0]).items():
                files.append(f"{phase}.{name}.rank{ranks[0]}.txt")
                context.folder.write(files[-1], str(one.bucketed.graph))
    return files
