"""A model cut into pipeline stages by module paths."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.played import bubble
    from pytest_fxbucket.pipeline.problems import table_problems
    from pytest_fxbucket.pipeline.propose import proposed_cuts
    from pytest_fxbucket.pipeline.schedules import Action, Table, table_of, text_of
    from pytest_fxbucket.pipeline.split import split_stages
    from pytest_fxbucket.pipeline.stages import Stage, Stages, Summary, Tie
    from pytest_fxbucket.step.pipelined import Crossing

__all__ = [
    "Action",
    "Crossing",
    "Stage",
    "Stages",
    "Summary",
    "Table",
    "Tie",
    "bubble",
    "proposed_cuts",
    "split_stages",
    "table_of",
    "table_problems",
    "text_of",
]


_MODULES = {
    **dict.fromkeys(("Action", "Table", "table_of", "text_of"), "schedules"),
    "bubble": "played",
    "proposed_cuts": "propose",
    "split_stages": "split",
    "table_problems": "problems",
}
"""Module of this folder by the name that it has; all other names are in ``stages``."""


def __getattr__(name: str) -> Any:
    """Import on first use: the names bring torch in."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'stages')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
