"""Steps in stages written by hand, of which each graph is one operator that takes as many microseconds as is said."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from pytest_fxbucket.step.pipelined import Crossing, Pipelined
from pytest_fxbucket.step.roles import MeshDim, Phase, StepGraph
from suites.graph.handmade import Handmade, aten


def place(rank: int, phases: Mapping[Phase, float], pipelined: Pipelined) -> tuple[StepGraph, dict[fx.Node, float]]:
    """The step of the rank at place ``rank`` along pp, whose graphs take as many microseconds; and seconds of their nodes."""
    graphs, inputs, outputs, took = {}, {}, {}, {}
    for phase, microseconds in phases.items():
        made = Handmade(1)
        node = made.call(aten.neg.default, made.batch(4))
        took[node] = microseconds * 1e-6
        graphs[phase] = fx.GraphModule(torch.nn.Module(), made.finish())
        inputs[phase], outputs[phase] = tuple(made.inputs), tuple(made.outputs)
        took |= {new: microseconds * 1e-6 for new in graphs[phase].graph.nodes if new.name == node.name}
    mesh = (MeshDim("pp", len(set(pipelined.pp_places))),)
    return StepGraph(graphs, inputs, outputs, (), (), mesh, rank, pipelined=pipelined), took


def two_stages(schedule: str, microbatches: int, crossing_bytes: int) -> Pipelined:
    """Two stages on two ranks, which send each other as many bytes."""
    one = (Crossing("h", "", 0, (crossing_bytes,), (1,), torch.uint8, crossing_bytes),)
    return Pipelined(schedule, microbatches, (0, 1), (one,), (one,), (), "pp")
