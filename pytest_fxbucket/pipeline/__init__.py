"""A model cut into pipeline stages by module paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.propose import proposed_cuts
    from pytest_fxbucket.pipeline.schedules import Action, Table, bubble, table_of, table_problems, text_of
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


def __getattr__(name: str) -> Any:
    """They bring torch in: only where they are asked for."""
    if name == "proposed_cuts":
        from pytest_fxbucket.pipeline.propose import proposed_cuts

        return proposed_cuts
    if name == "split_stages":
        from pytest_fxbucket.pipeline.split import split_stages

        return split_stages
    if name in ("Action", "Table", "bubble", "table_of", "table_problems", "text_of"):
        from pytest_fxbucket.pipeline import schedules

        return getattr(schedules, name)
    if name in __all__:
        from pytest_fxbucket.pipeline import stages

        return getattr(stages, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
