"""Beside pytest-timeout: what items import is imported before the clock of the first one runs.

An import of torch that is broken off leaves halves of its modules behind, which no later item can use, and may crash.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from pytest_fxbucket.pytest_plugin.items import OfPlan

if TYPE_CHECKING:
    import pytest

_IMPORTED = ("torch", "torch._dynamo", "torch.distributed.pipelining", "pytest_fxbucket.run", "pytest_fxbucket.capture")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import them if there is an item of a plan to run; what cannot be imported is for the item to say."""
    if not session.config.option.collectonly and any(isinstance(item, OfPlan) for item in session.items):
        for name in _IMPORTED:
            with suppress(Exception):
                import_module(name)
