"""A step that its maker keeps: a matrix that is gathered, and a constant of the graph's own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.capture.given_graphs import TracedStep
from pytest_fxbucket.compat.c10d import c10d_functional

GIVEN: list[fx.GraphModule] = []
_HALF = torch.full((4,), 0.5)
_collectives = c10d_functional()


def step() -> TracedStep:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]

    def run(half: Tensor, weight: Tensor, x: Tensor) -> list[Tensor]:
        whole = _collectives.wait_tensor(_collectives.all_gather_into_tensor(weight, ranks, group))
        y = torch.tanh(x @ whole) * half
        full = x.t() @ y
        return [y.sum(), _collectives.wait_tensor(_collectives.reduce_scatter_tensor(full, "sum", ranks, group))]

    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(2, 4, generator=generator), torch.randn(3, 2 * ranks, generator=generator)
    graph = make_fx(run, tracing_mode="fake")(_HALF, *inputs)
    _hold(graph, graph.graph.find_nodes(op="placeholder")[0])
    for node in graph.graph.nodes:
        node.meta["nn_module_stack"] = {"": ("", torch.nn.Module), "only": ("only", torch.nn.Module)}
    GIVEN.append(graph)
    roles = {"inputs": ["param", "batch"], "outputs": ["loss", "grad"]}
    names = {"inputs": ["only.weight", "x"], "outputs": ["", "only.weight"]}
    return TracedStep({"joint": graph}, {"joint": inputs}, {"joint": roles}, {"joint": names})


def _hold(module: fx.GraphModule, given: fx.Node) -> None:
    """Let ``module`` have what was given."""
    module.register_buffer("constant_half", _HALF.clone())
    with module.graph.inserting_after(given):
        held = module.graph.get_attr("constant_half")
    held.meta = dict(given.meta)
    given.replace_all_uses_with(held)
    module.graph.erase_node(given)
    module.recompile()
