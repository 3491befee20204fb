"""A model cut into pipeline stages by module paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.first_use import on_first_use

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
__getattr__ = on_first_use(
    __name__,
    {
        "pipeline.played": ["bubble"],
        "pipeline.problems": ["table_problems"],
        "pipeline.propose": ["proposed_cuts"],
        "pipeline.schedules": ["Action", "Table", "table_of", "text_of"],
        "pipeline.split": ["split_stages"],
        "pipeline.stages": ["Stage", "Stages", "Summary", "Tie"],
        "step.pipelined": ["Crossing"],
    },
)
