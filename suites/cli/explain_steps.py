"""Steps written by hand for ``fxbucket explain``: forward and backward apart, with something of everything in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture.traced import TracedStep
from suites.passes.hand_made import COLUMNS, RANKS, ROWS, HandMade, aten, c10d

LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")]
PARAMETERS = [*LAYERS, "odd.weight", "extra.weight", "unused.weight"]
TRAINED = [*LAYERS[:2], "layers.1.weight", "odd.weight", "extra.weight"]


def two_graphs() -> TracedStep:
    """Gathers in forward, reductions in backward.

    ``odd.weight`` is read before its wait, ``layers.1.bias`` is frozen, nobody reads ``unused.weight``, and the two
    gradients of ``layers.0`` are reduced by different operations.
    """
    print("a factory that prints")
    forward, backward = HandMade(), HandMade()
    names = [*PARAMETERS, "count"]
    shards = {name: forward.placeholder(name.replace(".", "_")) for name in names}
    x = forward.placeholder("x", ROWS * RANKS, COLUMNS)
    for name in (*LAYERS, "extra.weight"):
        x = forward.call(aten.mul.Tensor, x, forward.gather(shards[name], name.rpartition(".")[0]))
    odd = forward.gather(shards["odd.weight"], "odd")
    x = forward.call(aten.add.Tensor, forward.call(aten.add.Tensor, x, odd), odd.all_input_nodes[0])
    for name in TRAINED:
        full = backward.call(aten.neg.default, backward.placeholder(name.replace(".", "_"), ROWS * RANKS, COLUMNS))
        op = "sum" if name == "layers.0.bias" else "avg"
        launch = backward.call(c10d.reduce_scatter_tensor.default, full, op, RANKS, "0")
        backward.results.append(backward.call(c10d.wait_tensor.default, launch))
    for node in backward.graph.nodes:
        node.meta["autograd_backward"] = True
    graphs = {"forward": forward.returns(x), "backward": backward.returns()}
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
