"""The one item of a plan file, or of a row, that cannot be loaded: it fails, whatever ``-k`` and ``-m`` choose."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.pytest_plugin.pytest_internals import tell_by_text
from pytest_fxbucket.pytest_plugin.terminal import parts_of


class InPlanFile(pytest.Item):
    """An item that is headed with its plan file in failures."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        tell_by_text(self)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return file, line and heading; the line is 0, not None, which junit and xdist would trip over."""
        return self.path, 0, f"{parts_of(self.nodeid)[0]}: {self.name}"


class BrokenPlan(InPlanFile):
    """The one item of a plan file, or of a row of it, that cannot be loaded, so that other plans still run."""

    def __init__(self, *, reason: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reason = reason

    def runtest(self) -> None:
        """Fail with the sentence that says what is wrong with the file."""
        pytest.fail(self.reason, pytrace=False)


class AlwaysChosen:
    """Leaves broken plans out of what ``-k`` and ``-m`` deselect: each stands for items that might be chosen.

    pytest itself tells of a Python file that cannot be imported whatever is chosen of it.
    """

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Hide them meanwhile, but for what ``--deselect`` names."""
        named = tuple(config.option.deselect or ())
        broken = [item for item in items if isinstance(item, BrokenPlan) and not item.nodeid.startswith(named)]
        # --stepwise counts what is collected, and would take hidden items for a change of the suite.
        is_chosen = (config.option.keyword or config.option.markexpr) and not config.getoption("stepwise", False)
        hidden = broken if is_chosen else []
        items[:] = [item for item in items if item not in hidden]
        result = yield
        items += hidden
        return result
