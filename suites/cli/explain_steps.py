"""Steps for ``fxbucket explain``, by hand with something of everything in them, and whole; passes of somebody else."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket.capture.given_graphs import TracedStep
from pytest_fxbucket.fuzz.program import COLUMNS, Program, aten
from pytest_fxbucket.passes import manual_overlap_bucketing
from suites.graph.whole_steps import WholeStep, passed

RANKS = 4
LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")]
PARAMETERS = [*LAYERS, "odd.weight", "extra.weight", "unused.weight"]
TRAINED = [*LAYERS[:2], "layers.1.weight", "odd.weight", "extra.weight"]


def two_graphs() -> TracedStep:
    """Gathers in forward, reductions in backward.

    ``odd.weight`` is read before its wait, ``layers.1.bias`` is frozen, nobody reads ``unused.weight``, and the two
    gradients of ``layers.0`` are reduced by different operations.
    """
    print("a factory that prints")
    forward, backward = Program(RANKS), Program(RANKS)
    names = [*PARAMETERS, "count"]
    shards = {name: forward.given(name.replace(".", "_"), 2, COLUMNS) for name in names}
    x = forward.given("x", 2 * RANKS, COLUMNS)
    for name in (*LAYERS, "extra.weight"):
        forward.module = name.rpartition(".")[0]
        x = forward.call(aten.mul.Tensor, x, forward.gather(shards[name]))
    forward.module = "odd"
    odd = forward.gather(shards["odd.weight"])
    x = forward.add(forward.add(x, odd), odd.all_input_nodes[0])
    backward.backward, reduced = True, []
    for name in TRAINED:
        full = backward.neg(backward.given(name.replace(".", "_"), 2 * RANKS, COLUMNS))
        reduced.append(backward.reduce(full, "sum" if name == "layers.0.bias" else "avg"))
    graphs = {"forward": forward.returns(x), "backward": backward.returns(*reduced)}
    return TracedStep(
        graphs=graphs,
        inputs={phase: _inputs(gm) for phase, gm in graphs.items()},
        roles={
            "forward": {"inputs": ["param"] * len(PARAMETERS) + ["buffer", "batch"], "outputs": ["loss"]},
            "backward": {"inputs": ["batch"] * len(TRAINED), "outputs": ["grad"] * len(TRAINED)},
        },
        fqns={
            "forward": {"inputs": [*names, "x"], "outputs": [""]},
            "backward": {"inputs": TRAINED, "outputs": TRAINED},
        },
    )


def _inputs(gm: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(node.meta["val"].shape) for node in gm.graph.find_nodes(op="placeholder"))


def merges_nothing(gm: fx.GraphModule, module_bucket_plans: Any) -> fx.GraphModule:
    """A pass of somebody else."""
    return gm


def by_entry() -> TracedStep:
    return _traced(WholeStep(kind="fused"))


def clipped() -> TracedStep:
    return _traced(WholeStep(kind="fused", clips=True))


def early(gm: fx.GraphModule, module_bucket_plans: Any) -> fx.GraphModule:
    """A pass of somebody else, which does what ours does."""
    return fx.GraphModule(torch.nn.Module(), passed(WholeStep(kind="fused")).graph)


def _traced(step: WholeStep) -> TracedStep:
    gm = fx.GraphModule(torch.nn.Module(), step.finish())
    ends = {"inputs": step.inputs, "outputs": step.outputs}
    return TracedStep(
        graphs={"joint": gm},
        inputs={"joint": tuple(torch.ones(value.shape, dtype=value.dtype) for value in step.inputs)},
        roles={"joint": {side: [value.role for value in values] for side, values in ends.items()}},
        fqns={"joint": {side: [value.fqn for value in values] for side, values in ends.items()}},
    )


def not_on_rank_3(gm: fx.GraphModule, module_bucket_plans: Any) -> fx.GraphModule:
    """Wrongly makes another graph on one rank."""
    return gm if dist.get_rank() == 3 else manual_overlap_bucketing(gm, module_bucket_plans)
