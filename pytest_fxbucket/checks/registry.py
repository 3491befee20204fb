"""The checks of a plan, in the order of their items: the one place that knows them all.

A check is a module with a function ``run(context: Context) -> Verdict``, a row here, and its options in the schema
(:class:`pytest_fxbucket.plan.schema_checks.Checks`). Rows name modules as text: some of them import this package themselves,
and they import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from pytest_fxbucket.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.checks.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a plan."""

    name: str
    """Name of its item, and its key in ``[checks]``."""
    module: str
    """Module with ``run(context)``, imported when the check runs."""
    on_ranks: bool = False
    """Whether it runs the step on ranks, as many as ``[run] world`` says."""
    is_of_pass: bool = True
    """Whether it judges the graphs that a pass made. Then, of several passes, the first behind which it is red can be named."""
    needs_options: bool = False
    """Whether nothing can be looked at unless the plan has the check on, with limits."""

    def run(self, context: Context) -> Verdict:
        """Look at the plan. Raises FxbucketError for what could not be looked at."""
        if self.needs_options and not getattr(context.plan.checks, self.name):
            raise UsageError(f"{context.name}: {self.name} has nothing to hold the step to; give the plan [checks] {self.name}")
        return cast("Callable[[Context], Verdict]", import_module(self.module).run)(context)


CHECKS = {
    check.name: check
    for check in (
        Check("audit", "pytest_fxbucket.checks.audit"),
        Check("golden", "pytest_fxbucket.checks.golden"),
        Check("collectives", "pytest_fxbucket.checks.collectives"),
        Check("same", "pytest_fxbucket.same.check"),
        Check("overlap", "pytest_fxbucket.checks.overlap", needs_options=True),
        Check("memory", "pytest_fxbucket.checks.memory", needs_options=True),
        Check("bitwise", "pytest_fxbucket.checks.bitwise.check", on_ranks=True),
        Check("eager", "pytest_fxbucket.eager.check", on_ranks=True),
        Check("mutation", "pytest_fxbucket.mutate.check", on_ranks=True, is_of_pass=False, needs_options=True),
        Check("benchmark", "pytest_fxbucket.bench.step_time", on_ranks=True, is_of_pass=False),
    )
}
ON_RANKS = frozenset(name for name, check in CHECKS.items() if check.on_ranks)


def check_of(name: str) -> Check:
    """The check called ``name``. Raises UsageError for one that there is not."""
    if name not in CHECKS:
        raise UsageError(f"there is no check {name!r}; known are {', '.join(CHECKS)}")
    return CHECKS[name]
