"""Runs in the ranks: whole steps, a captured graph's and eager torch's, with what they leave behind after each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures.reference.stepping import called, imported, loss_of
from pytest_fxbucket.capture.mesh import make_groups
from pytest_fxbucket.checks.bitwise_job import KEPT, Task, state_and_batches
from pytest_fxbucket.graph.portable import decode

Step = dict[str, dict[str, Tensor]]
"""By ``loss``, ``gradient``, ``parameter`` and ``state``, then by name; of this rank's own rows."""


def graph_steps(rank: int, world: int, payload: Mapping[str, Any]) -> list[Step]:
    """Step the graph of ``task`` with a learning rate that ``decay`` shrinks after each step."""
    task: Task = payload["task"]
    make_groups(task.mesh, rank)
    graph = decode(task.unbucketed)
    state, batches = state_and_batches(rank, task)
    kept = [(value.role, value.fqn) for value in task.inputs if value.role in KEPT]
    now = dict(zip(kept, state, strict=True))
    steps = []
    for number in range(task.steps):
        made = graph(*(now[key] for key in kept), *batches(number))
        results = {(v.role, v.fqn): result for v, result in zip(task.outputs, made, strict=True)}
        now.update({key: value for key, value in results.items() if key in now})
        now.update({key: value * payload["decay"] for key, value in now.items() if key[0] == "hyper"})
        steps.append(dict(_sorted(results, payload["shapes"], _index(rank, payload), payload["shards"])))
    return steps


def _sorted(
    results: Mapping[tuple[str, str], Tensor], shapes: Mapping[str, Any], index: int, shards: int
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    names = {"loss": "loss", "grad": "gradient", "param": "parameter", "state": "state"}
    for role, what in names.items():
        found = {fqn: value.clone() for (of, fqn), value in results.items() if of == role}
        yield what, dict(_own(found, shapes, index, shards))


def _own(found: Mapping[str, Tensor], shapes: Mapping[str, Any], index: int, shards: int) -> Iterator[tuple[str, Tensor]]:
    for name, value in found.items():
        owner = next((fqn for fqn in shapes if name == fqn or name.startswith(f"{fqn}.")), None)
        if owner is None or not value.dim():
            yield name, value
        else:
            chunks = torch.empty(shapes[owner][0], 0).chunk(shards)
            yield name, value[: len(chunks[index]) if index < len(chunks) else 0]


def _index(rank: int, payload: Mapping[str, Any]) -> int:
    return rank % int(payload["shards"])


def eager_steps(rank: int, world: int, payload: Mapping[str, Any]) -> list[Step]:
    """The same by torch: ``fully_shard`` on a mesh of ``replicas`` x ``shards``, or DistributedDataParallel with 1 shard.

    ``optimizers`` are (factory, arguments, [(FQNs, arguments of the group)]); ``clip_norm`` as ``clip_grad_norm_`` takes it.
    """
    torch.manual_seed(0)
    model: nn.Module = imported(payload["factory"])(**payload["args"])
    wrapped = _parallel(model, world // payload["shards"], payload["shards"], payload["units"])
    named = dict(model.named_parameters())
    optimizers = [
        factory([{"params": [named[fqn] for fqn in fqns], **more} for fqns, more in groups], **args)
        for factory, args, groups in ((imported(f), a, g) for f, a, g in payload["optimizers"])
    ]
    steps: list[Step] = []
    for number in range(payload["steps"]):
        batch = imported(payload["batch"])(rank, number)
        loss = loss_of(called(wrapped, batch), batch, payload["loss"])
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {fqn: _local(p.grad).clone() for fqn, p in named.items() if p.grad is not None}
        if payload["clip_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), payload["clip_norm"])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= payload["decay"]
        held = {fqn: _state_of(optimizers, parameter) for fqn, parameter in named.items()}
        steps.append(
            {
                "loss": {"": loss.detach().clone()},
                "gradient": gradients,
                "parameter": {fqn: _local(parameter).clone() for fqn, parameter in named.items() if fqn in gradients},
                "state": {f"{fqn}.{key}": _local(value).clone() for fqn, of in held.items() for key, value in of.items()},
            }
        )
    return steps


def _parallel(model: nn.Module, replicas: int, shards: int, units: Sequence[Sequence[str]]) -> nn.Module:
    if shards == 1:
        return DistributedDataParallel(model)
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
    over = mesh if replicas > 1 else mesh["dp_shard"]
    for unit in units:
        fully_shard([model.get_submodule(name) for name in unit], mesh=over)
    fully_shard(model, mesh=over)
    return model


def _state_of(optimizers: Sequence[torch.optim.Optimizer], parameter: Tensor) -> dict[str, Tensor]:
    owner = next((one for one in optimizers if parameter in one.state), None)
    return {} if owner is None else {key: value for key, value in owner.state[parameter].items() if isinstance(value, Tensor)}


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
