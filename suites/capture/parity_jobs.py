"""Runs in the ranks: a captured, unbucketed graph, stepped with the update of fixtures.reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fixtures.reference.stepping import built, imported
from pytest_fxbucket.capture.override.calls import keep_for_calls, modules_called_by
from pytest_fxbucket.capture.parallel.context_parallel import cut_sequences
from pytest_fxbucket.capture.parallel.parts import ParameterShards
from pytest_fxbucket.capture.parallel.sequence_parallel import place_name
from pytest_fxbucket.capture.unregistered import unregistered_tensors
from pytest_fxbucket.step.mesh import Mesh, make_groups
from pytest_fxbucket.step.portable import decode
from pytest_fxbucket.step.roles import Parameter


def graph_steps(rank: int, world: int, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Step ``graph`` on this rank.

    Keys of ``payload``: those of every reference; ``graph`` (portable), ``inputs`` and ``outputs`` (its values),
    ``parameters``, ``capture_mesh`` and ``parallel`` (of the plan), ``by_rows`` (whether the mode shards dimension 0).
    Returns what a reference returns.
    """
    make_groups(payload["capture_mesh"], rank)
    model, parts = built(payload), ParameterShards.of(payload["parallel"], payload["capture_mesh"])
    graph, batch = decode(payload["graph"]), imported(payload["batch"])
    whole = dict(model.named_parameters())
    state = {p.fqn: parts.of_rank(whole[p.fqn].detach(), p, rank) for p in payload["parameters"]}
    state |= {place_name(dim): torch.tensor(payload["capture_mesh"].at(rank, dim)) for dim in ("cp", "tp")}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = [name for name, _ in model.named_buffers()]
    state |= unregistered_tensors(model)
    state |= {name: first.clone() for name, first in payload["first_state"].items()}
    keep_for_calls(model, modules_called_by(graph.graph))
    steps = []
    for step in range(payload["steps"]):
        data = cut_sequences(batch(payload["data_rank"][rank], step), payload["capture_mesh"], rank)
        leaves = [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, Tensor)]
        inputs = [state[v.fqn] for v in payload["inputs"] if v.role in ("param", "buffer", "held", "state")]
        loss, *rest = graph(*inputs, *leaves)
        new = {v.fqn: value for v, value in zip(payload["outputs"][1:], rest, strict=True) if v.role == "state"}
        state |= new
        grads = rest[: len(rest) - len(new)]
        fqns = [value.fqn for value in payload["outputs"] if value.role == "grad"]
        for fqn, grad in zip(fqns, grads, strict=True):
            state[fqn].add_(grad, alpha=-payload["lr"])
        steps.append({"loss": loss, "gradients": dict(own_rows(rank, payload, dict(zip(fqns, grads, strict=True))))})
    return {
        "steps": steps,
        "parameters": dict(own_rows(rank, payload, {p.fqn: state[p.fqn] for p in payload["parameters"]})),
        "buffers": {name: state[name] for name in buffers},
        "state": {name: state[name] for name in payload["first_state"]},
    }


def own_rows(rank: int, payload: Mapping[str, Any], padded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``padded`` as torch.chunk deals their rows, without padding."""
    described = {p.fqn: p for p in payload["parameters"]}
    for fqn, tensor in padded.items():
        rows = rows_of(rank, payload["capture_mesh"], described[fqn]) if payload["by_rows"] else len(tensor)
        yield fqn, tensor[:rows].clone()


def rows_of(rank: int, mesh: Mesh, parameter: Parameter) -> int:
    """How many rows of ``parameter`` torch.chunk deals to ``rank``."""
    along = "dp_shard_mod_ep" if parameter.is_expert else mesh.data_parallel("dp_shard")
    rows = parameter.local_shape[0] if parameter.local_shape else 1
    chunks = torch.empty(rows, 0).chunk(mesh.degree(along))
    at = mesh.at(rank, along)
    return len(chunks[at]) if at < len(chunks) else 0


def graph_once(rank: int, world: int, payload: Any) -> list[Tensor]:
    """What a portable graph gives for the inputs that come with it."""
    graph, inputs = payload
    return list(decode(graph)(*inputs))
