"""A find once more, on ranks that are processes: do they leave other values, or never end?"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pytest_fxbucket.errors import FxbucketError, PassError, text_of
from pytest_fxbucket.fuzz.finds import HANG, RAISED, VALUES
from pytest_fxbucket.fuzz.inputs import given
from pytest_fxbucket.fuzz.judge import made_of
from pytest_fxbucket.fuzz.on_ranks import JOB, named_groups
from pytest_fxbucket.fuzz.rank_job import Case
from pytest_fxbucket.step.portable import encode, encode_module

if TYPE_CHECKING:
    from pytest_fxbucket.fuzz.finds import Find
    from pytest_fxbucket.fuzz.trial import Trial
    from pytest_fxbucket.fuzz.tried_pass import Subject
    from pytest_fxbucket.ranks.pools import Pools

LIMIT_S = 20.0
"""What ranks that do not answer by then are said to hang."""


def on_real_ranks(pools: Pools, trial: Trial, find: Find, subject: Subject) -> str:
    """What ranks over gloo say of ``find``, a sentence; empty where it is nothing that ranks could tell."""
    if find.kind not in (HANG, VALUES) and not (find.kind == RAISED and "what it made raises" in find.says):
        return ""
    world, before = trial.program.world, trial.before
    try:
        made = made_of(trial, subject)
        groups = named_groups(trial.program.groups, before, *made.after)
        cases = [
            Case(encode_module(before), (encode(one.graph, one, subject.modules),), tuple(given(before)), 0, groups)
            for one in made.after
        ]
    except PassError as error:
        return f"ranks cannot be sent what it made: {error}"
    try:
        results = pools.get(world).run(JOB, cases, timeout_s=LIMIT_S, what="what the pass made of a drawn program")
    except FxbucketError as error:
        return f"{world} gloo ranks: {text_of(error)[:300]}"
    texts = [text for result in cast("list[list[list[str]]]", results) for text in result[0]]
    return f"{world} gloo ranks: {texts[0]}" if texts else f"{world} gloo ranks leave the same bits: it depends on timing"
