"""Runs in the ranks: clipping by the global norm of sharded gradients, by torch on DTensors, an update's graph, whole steps."""

from __future__ import annotations

from typing import Any

import torch

from pytest_fxbucket.capture.clip import Clip, NormDim
from pytest_fxbucket.capture.optimizers.update import trace_update
from pytest_fxbucket.step.mesh import make_groups
from pytest_fxbucket.step.portable import PortableGraph, decode
from pytest_fxbucket.step_runner import StepTask, state_and_batches
from suites.capture.optimizer_steps import beginning, step, values


def clipped(rank: int, world: int, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """For each norm, parameters of this rank after a clipped step, torch's and the graph's, and the graph's all-reduces.

    ``payload``: ``mesh`` {name: size}, ``placed`` {fqn: (local shape, {dim: sharded dimension})}, ``max_norms``.
    """
    from torch.distributed.device_mesh import init_device_mesh

    sizes = payload["mesh"]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    place = dict(zip(sizes, mesh.get_coordinate(), strict=True))
    locals_ = {fqn: _local(fqn, shape, sharded, place) for fqn, (shape, sharded) in payload["placed"].items()}
    return [_both(mesh, payload, locals_, max_norm) for max_norm in payload["max_norms"]]


def _both(mesh: Any, payload: Any, locals_: Any, max_norm: float) -> dict[str, Any]:
    sizes = payload["mesh"]
    eager = _eager(mesh, payload, locals_, max_norm)
    dims = tuple(NormDim(name, mesh.get_group(name).group_name, size) for name, size in sizes.items())
    clip = Clip(max_norm, dims, {fqn: tuple(sharded) for fqn, (_, sharded) in payload["placed"].items()})
    parameters = {fqn: parameter for fqn, (parameter, _) in locals_.items()}
    update = trace_update(_sgd, values(parameters), list(parameters), clip)
    now, rates = beginning(_sgd, parameters, list(parameters))
    step(update, now, {fqn: grad for fqn, (_, grad) in locals_.items()}, rates)
    reductions = [node for node in update.graph_module.graph.nodes if "all_reduce" in str(node.target)]
    return {"eager": eager, "graph": [now[fqn] for fqn in parameters], "reductions": len(reductions)}


def _sgd(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(list(parameters.values()), lr=0.1)]


def _local(fqn: str, shape: Any, sharded: Any, place: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameter and gradient, other ones for each coordinate of the dimensions that shard them."""
    seed = sum(ord(letter) for letter in fqn) + sum(1000 * (i + 1) * place[dim] for i, dim in enumerate(sharded))
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


def clipped_step(
    rank: int, world: int, payload: tuple[StepTask, PortableGraph]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By FQN each gradient of this rank in one whole step, and what the optimizer got of it: the first momentum."""
    task, graph = payload
    make_groups(task.mesh, rank)
    state, batch = state_and_batches(rank, task)
    made = {(v.role, v.fqn): one for v, one in zip(task.outputs, decode(graph)(*state, *batch(0)), strict=True)}
    return {fqn: (one, made["state", f"{fqn}.momentum_buffer"]) for (role, fqn), one in made.items() if role == "grad"}


def _eager(mesh: Any, payload: Any, locals_: Any, max_norm: float) -> list[torch.Tensor]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    parameters = []
    for fqn, (_, sharded) in payload["placed"].items():
        placements = [Shard(sharded[dim]) if dim in sharded else Replicate() for dim in payload["mesh"]]
        parameter, grad = (DTensor.from_local(tensor.clone(), mesh, placements) for tensor in locals_[fqn])
        parameters.append(torch.nn.Parameter(parameter))
        parameters[-1].grad = grad
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    torch.optim.SGD(parameters, lr=0.1).step()
    return [parameter.detach().to_local() for parameter in parameters]
