"""Whole steps written by hand, as steps that next_iteration takes; and what its graphs do, in a few words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from pytest_fxbucket.checks.promises.iterations import ReadPhase
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.step.roles import Parameter, Phase, StepGraph
from pytest_fxbucket.transforms.next_iteration import next_iteration
from suites.graph.whole_steps import WholeStep, passed

TWO = ["b", "c"]
ENTRY_OF = {f"{layer}.{name}": layer for layer in TWO for name in "wb"}


def step_of(whole: WholeStep, graph: fx.Graph | None = None, trainable: bool = True) -> StepGraph:
    """``whole``, or ``graph`` that was made of it."""
    own = graph or whole.finish()
    modules = ["", *whole.layers]
    parameters = tuple(Parameter(one.fqn, (), (8,), (4,), torch.float32, trainable, (8,)) for one in whole.held)
    return StepGraph(
        graphs={"joint": fx.GraphModule(torch.nn.Module(), own)},
        inputs={"joint": tuple(whole.inputs)},
        outputs={"joint": tuple(whole.outputs)},
        parameters=parameters,
        modules=tuple(modules),
        mesh=(),
        rank=0,
    )


def bucketed(whole: WholeStep, **options: object) -> StepGraph:
    """``whole`` through our pass, a bucket a layer."""
    return step_of(whole, passed(whole, **options).graph)


def moved(step: StepGraph, entries: Sequence[object] = TWO) -> StepGraph:
    return next_iteration(step, {}, entries=entries)


def reading_of(step: StepGraph, phase: Phase) -> GraphAnalysis:
    return read_graph(step.graphs[phase].graph, step.inputs[phase], step.outputs[phase])


def phased(step: StepGraph, phase: Phase) -> ReadPhase:
    return ReadPhase(reading_of(step, phase), step.inputs[phase], step.outputs[phase])


def events(step: StepGraph, phase: Phase) -> list[str]:
    """Launches and waits of gathers and reductions, compute and updates by layer, in order; of equal ones in a row one."""
    reading = reading_of(step, phase)
    assert reading.problems == ()
    short = {"all_gather": "gather", "reduce_scatter": "reduce"}
    found = []
    for bucket in reading.buckets:
        name = f"{short[bucket.kind]} {bucket.fqns[0][:1]}"
        found.append((bucket.launch, f"launch {name}"))
        found += [(where, f"wait {name}") for where in bucket.waits]
    found += [(where, f"{of} {fqn[:1]}") for where, of, fqn in reading.computes]
    told = [what for _, what in sorted(found)]
    return [what for at, what in enumerate(told) if at == 0 or told[at - 1] != what]
