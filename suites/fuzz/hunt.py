"""Hunts for a graph that our pass changes, breaks or refuses: random programs and plans, on all ranks before and after."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.fuzz.drawing import DrawingStep
from pytest_fxbucket.fuzz.judge import judged, made_of
from pytest_fxbucket.fuzz.on_ranks import compare
from pytest_fxbucket.fuzz.small_programs import sweeps
from pytest_fxbucket.fuzz.strategies import TRAINING, by_hand, crossing, drawn, steps
from pytest_fxbucket.fuzz.trial import PlanChoice
from pytest_fxbucket.fuzz.tried_pass import subject_of
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.ranks.pools import Pools


@dataclass
class Hunt:
    """What a hunt came to."""

    world: int
    equal: int = 0
    """Graphs that were found equal, up to the first that was not."""
    merged: int = 0
    """Of them those that had fewer launches after the pass."""
    trouble: Exception | None = None
    """With the smallest program that shows it, as a note."""


def hunt(pools: Pools | None, world: int, count: int, number: int, plans: st.SearchStrategy[PlanChoice] = by_hand) -> Hunt:
    """Look at ``count`` graphs that the seed ``number`` gives, on ``world`` ranks; the first that is not well ends it.

    Without ``pools`` all ranks are in this process.
    """
    found = Hunt(world)

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(steps=steps(), chosen=plans)
    def look(steps: list[DrawingStep], chosen: PlanChoice) -> None:
        try:
            merged = look_at(pools, world, steps, chosen)
        except Exception as error:
            found.trouble = error
            raise
        if found.trouble is None:
            found.equal += 1
            found.merged += merged

    try:
        look()
    except Exception as error:
        found.trouble = error
    return found


def look_at(pools: Pools | None, world: int, steps: Sequence[DrawingStep], chosen: PlanChoice) -> bool:
    """Take the program of ``steps`` through the pass; whether launches were merged.

    Raises AssertionError for what is not well.
    """
    subject = subject_of("manual")
    trial = chosen.trial(drawn(world, steps))
    found = judged(trial, subject)
    assert found is None, found.text
    try:
        before, after = trial.graph_module, made_of(trial, subject).after[0]
    except PlanError:  # a place by hand that cannot be had, or judged would have said it
        return False
    if pools is not None:
        differences = compare(pools, before, after, world, len(steps), trial.program.groups)
        assert not differences, "\n".join([*differences, str(before.graph), str(after.graph)])
    launches = [sum(launch_kind(node) is not None for node in one.graph.nodes) for one in (before, after)]
    return launches[1] < launches[0]


def crossed(world: int, count: int, number: int) -> int:
    """Of ``count`` training steps that the seed ``number`` gives, how many let work cross iterations; raises as `look_at`."""
    found = 0

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(steps(TRAINING, 2, 12, 5), crossing)
    def look(drawn_steps: list[DrawingStep], chosen: PlanChoice) -> None:
        nonlocal found
        trial, subject = chosen.trial(drawn(world, [DrawingStep("parameter"), *drawn_steps])), subject_of("manual")
        find = judged(trial, subject)
        assert find is None, find.text
        with contextlib.suppress(PassError):  # an entry that may not move
            made_of(trial, subject)
            found += 1

    look()
    return found


def swept(world: int, every: int = 1) -> None:
    """Try every so manieth of the small programs that each search begins with; raises AssertionError for a find."""
    subject = subject_of("manual")
    for trial in islice(next(sweeps(world, subject)), 0, None, every):
        assert judged(trial, subject) is None, trial.graph_module.graph
