"""Small programs one after the other, each with one thing that a pass may trip over: what every search begins with.

Chance finds what nobody thought of, but needs long for two things that must meet. Here each way to launch meets each twist.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle
from typing import TYPE_CHECKING

from pytest_fxbucket.fuzz import strategies
from pytest_fxbucket.fuzz.chosen import Chosen
from pytest_fxbucket.fuzz.drawing import Step
from pytest_fxbucket.fuzz.drawn import drawn
from pytest_fxbucket.fuzz.program import Program
from pytest_fxbucket.fuzz.small_programs import OFTEN, OTHER, STEP, Build, programs
from pytest_fxbucket.fuzz.training_steps import UPDATES
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.modules import module_stack

if TYPE_CHECKING:
    from pytest_fxbucket.fuzz.trial import Trial
    from pytest_fxbucket.fuzz.tried_pass import Subject


def sweeps(ranks: int, subject: Subject) -> Iterator[Iterator[Trial]]:
    """Every program with plain options, and every plan that is wrong; then a sweep for each other value of an option."""
    plain, *others = strategies.one_at_a_time(subject)
    yield chain(
        (_trial(ranks, build, plain) for build in programs()),
        (_trial(ranks, STEP, chosen) for chosen in strategies.wrong_plans(subject)),
        training(ranks) if subject.is_ours else (),
    )
    for chosen in others:
        yield (_trial(ranks, build, chosen) for build in programs(OFTEN))


def training(ranks: int) -> Iterator[Trial]:
    """Whole training steps of three layers, with each kind of update, whose last entries move to the next call."""
    for number, moved in zip(range(len(UPDATES)), cycle(((2,), (0,), (1, 2))), strict=False):
        layers = [Step("parameter", layer, number) for layer in range(3)]
        updates = [Step("update", layer, number, number) for layer in range(3)]
        steps = [*layers, *[Step("gradient")] * 3, *updates]
        yield Chosen(plan=1, updates="ready", moved=moved).trial(drawn(ranks, steps))


def _trial(ranks: int, build: Build, chosen: Chosen) -> Trial:
    everybody = list(range(ranks))
    made = Program(ranks, {OTHER: [everybody], "alone": [[rank] for rank in everybody]})
    outputs = build(made)
    graph_module = made.returns(*outputs)
    stacks = [module_stack(node) for node in graph_module.graph.nodes if launch_kind(node) is not None]
    return chosen.of(made, graph_module, [stack[-1][0][-1] for stack in stacks])
