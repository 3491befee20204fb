"""The reductions of the entries that are to move, or why there is none that could move by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PassError

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import StepGraph
    from pytest_fxbucket.graph.reductions import Reduction
    from pytest_fxbucket.plan.selector import ResolvedEntry

NAME = "next_iteration"


def moved_reductions(everything: Sequence[Reduction], step: StepGraph, moved: Sequence[ResolvedEntry]) -> list[Reduction]:
    """Of ``everything`` the reductions of the entries ``moved``, in order of launch.

    Raises :class:`PassError` for an entry without any, for one that is reduced more than once in a step, and for a launch that
    carries anything else besides.
    """
    entry_of = {fqn: entry.name for entry in moved for fqn in entry.parameters}
    found = [one for one in everything if not entry_of.keys().isdisjoint(one.fqns)]
    reduced = {fqn for one in found for fqn in one.fqns}
    for entry in moved:
        if reduced.isdisjoint(entry.parameters):
            raise PassError(f"{NAME}: entry {entry.name} cannot move: {_why_none(step, entry)}")
    for one in found:
        _refuse_company(one, entry_of)
    _refuse_again(found, entry_of)
    return found


def _refuse_company(one: Reduction, entry_of: dict[str, str]) -> None:
    """A launch goes as a whole."""
    others = [fqn for fqn in one.fqns if fqn not in entry_of]
    if not others:
        return
    entry = next(entry_of[fqn] for fqn in one.fqns if fqn in entry_of)
    what = f"the gradient of {others[0]}" if others[0] else "what is no parameter's gradient"
    raise PassError(
        f"{NAME}: entry {entry} cannot move: its reduction ({one.launch.name}) also carries {what}, which does not move; "
        "name what shares its bucket too, or give it a bucket of its own"
    )


def _refuse_again(found: Sequence[Reduction], entry_of: dict[str, str]) -> None:
    seen: dict[tuple[str, int], fx.Node] = {}
    for one in found:
        for fqn in one.fqns:
            before = seen.setdefault((fqn, one.level), one.launch)
            if before is not one.launch:
                raise PassError(
                    f"{NAME}: entry {entry_of[fqn]} cannot move: the gradient of {fqn} is reduced more than once in a step "
                    f"({before.name} and {one.launch.name}); add up the parts of microbatches and reduce their sum once"
                )


def _why_none(step: StepGraph, entry: ResolvedEntry) -> str:
    trained = [p.fqn for p in step.parameters if p.fqn in entry.parameters and p.trainable]
    if not trained:
        return "none of its parameters is trained"
    return f"no reduction brings the gradient of {trained[0]}, so there is nothing that could be hidden"
