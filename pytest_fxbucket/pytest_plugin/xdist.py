"""Keeps one plan's items on one worker of pytest-xdist, so that a plan is traced once; imported only with xdist."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # xdist has no types

from pytest_fxbucket.pytest_plugin.terminal import parts_of

if TYPE_CHECKING:
    from xdist.remote import Producer  # type: ignore[import-untyped]  # xdist has no types
    from xdist.workermanage import WorkerController  # type: ignore[import-untyped]  # xdist has no types


class PlanScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each worker whole plan files, and other tests one by one, as the default ``load`` does."""

    def _split_scope(self, nodeid: str) -> str:
        path, name = parts_of(nodeid)
        return path if name and path.endswith(".toml") else nodeid

    def _reschedule(self, node: WorkerController) -> None:
        """Give ``node`` work until it has two items left, or no unit is: it holds its last one back until another comes."""
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the item that ``node`` died in, if it died; unlike the base class, do not run that item again."""
        # The base class puts the unit back into the queue. Marked as done, the item that ended this worker is not run again
        # there, where it would end the next one too.
        units: list[dict[str, bool]] = list(self.assigned_work[node].values())
        left = ((unit, item) for unit in units for item, done in unit.items() if not done)
        unit, crashed = next(left, ({}, None))
        if crashed is not None:
            unit[crashed] = True
        super().remove_node(node)
        return crashed


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> PlanScheduling | None:
    """Keep plans whole where the user chose no other distribution."""
    # ``load`` is what -n alone means.
    return PlanScheduling(config, log) if config.getvalue("dist") == "load" else None
