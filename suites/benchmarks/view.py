"""What a GraphView costs beside one walk over the graph's nodes, their inputs and their users; in one run, as a ratio.

``python -m suites.benchmarks.view`` prints it for a joint graph of many layers.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from pytest_fxbucket.graph_view import GraphView


@dataclass(frozen=True)
class Cost:
    """Seconds, each the best of the runs."""

    nodes: int
    walk: float
    tree: float
    """All modules and which nodes ran in each."""
    text: float
    """The tree, directions and kinds of all nodes, parameters, and all of it printed."""

    @property
    def line(self) -> str:
        return (
            f"{self.nodes:,} nodes: one walk {self.walk * 1e3:.1f} ms; GraphView {self.tree * 1e3:.1f} ms, "
            f"{self.tree / self.walk:.2f} walks; with kinds, parameters and repr {self.text / self.walk:.1f} walks"
        )


def measure(graph: fx.Graph, runs: int = 5) -> Cost:
    """Cost of a view of ``graph`` and of a walk over it, taken in turn; the garbage collector waits."""
    work: list[Callable[[], object]] = [lambda: walk(graph), lambda: GraphView(graph), lambda: repr(GraphView(graph))]
    best = [float("inf")] * len(work)
    gc.collect()
    gc.disable()
    try:
        for _ in range(runs):
            for i, do in enumerate(work):
                begin = time.perf_counter()
                do()
                best[i] = min(best[i], time.perf_counter() - begin)
    finally:
        gc.enable()
    return Cost(len(graph.nodes), *best)


def walk(graph: fx.Graph) -> int:
    """Visit every node, every input of it and every user of it."""
    visited = 0
    for node in graph.nodes:
        visited += 1
        for _ in node.all_input_nodes:
            visited += 1
        for _ in node.users:
            visited += 1
    return visited


def layered(layers: int) -> fx.Graph:
    """A joint graph: ``layers`` layers of nine modules, 16 nodes each in both directions, each node with a stack of its own."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    leaves = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo", "norm")] + [
        f"mlp.{name}" for name in ("up", "gate", "down", "norm")
    ]
    for key, order in (("nn_module_stack", range(layers)), ("fwd_nn_module_stack", reversed(range(layers)))):
        for layer in order:
            for leaf in leaves:
                parts = ["layers", str(layer), *leaf.split(".")]
                paths = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
                for _ in range(16):
                    x = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
                    x.meta[key] = {path: (path, torch.nn.Module) for path in paths}
    graph.output(x)
    return graph


if __name__ == "__main__":
    for layers in (80, 160, 350):
        print(measure(layered(layers)).line)
