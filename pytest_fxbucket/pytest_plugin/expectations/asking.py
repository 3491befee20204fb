"""The test that asks for a comparison: what it may write, the plan in use, and where what is too long to be shown goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_fxbucket.pytest_plugin.items import PlanRef
from pytest_fxbucket.pytest_plugin.session import fx_session

if TYPE_CHECKING:
    from pytest_fxbucket.artifacts import Folder
    from pytest_fxbucket.run import PlanRun


class Asking:
    """A test that uses ``fxbucket_golden`` or ``fxbucket_expect``."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self.item: pytest.Item = request.node
        self.fx = fx_session(request.config)
        self.options = self.fx.options

    def plan_run(self) -> PlanRun | None:
        """The run of the plan in use, if there is one."""
        used = "fxbucket_plan" in self._request.fixturenames
        found: PlanRun | None = self._request.getfixturevalue("fxbucket_run") if used else None
        return found

    def folder(self, name: str) -> Folder:
        """For what is too long to be shown of ``name``."""
        from pytest_fxbucket.artifacts import Folder

        return Folder(self.options.artifacts, self.item.nodeid.partition("::")[0], name, self.options.log_of)

    def arguments(self) -> list[str]:
        """Arguments of pytest that run the test: its node id, and the plan that the option gave it."""
        words = [self.item.nodeid]
        callspec = getattr(self.item, "callspec", None)
        ref = callspec.params.get("fxbucket_plan") if callspec is not None else None
        if isinstance(ref, PlanRef) and ref.path in self.options.plans:
            words.append(f"--fxbucket-plans={self.options.shown(ref.path)}")
        return words
