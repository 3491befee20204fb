"""Runs in the ranks: a captured, unbucketed graph, stepped with the update of fixtures.reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fixtures.reference import imported
from pytest_fxbucket.graph.portable import decode


def graph_steps(rank: int, world: int, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Step ``graph`` on this rank.

    Keys of ``payload``: those of ``fsdp2_steps``; ``graph`` (portable), ``inputs`` and ``outputs`` (its values), ``shapes``
    (full shape of each parameter). Returns what ``fsdp2_steps`` returns, and ``buffers`` after the last step.
    """
    torch.manual_seed(payload["seed"])
    model = imported(payload["factory"])(**payload["args"])
    graph, batch = decode(payload["graph"]), imported(payload["batch"])
    state = {name: padded_rows(p.detach(), rank, world) for name, p in model.named_parameters()}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    steps = []
    for step in range(payload["steps"]):
        leaves = [leaf for leaf in pytree.tree_leaves(batch(rank, step)) if isinstance(leaf, Tensor)]
        inputs = [state[v.fqn] for v in payload["inputs"] if v.role in ("param", "buffer")]
        loss, *grads = graph(*inputs, *leaves)
        fqns = [value.fqn for value in payload["outputs"] if value.role == "grad"]
        for fqn, grad in zip(fqns, grads, strict=True):
            state[fqn].add_(grad, alpha=-payload["lr"])
        steps.append({"loss": loss, "gradients": dict(own_rows(rank, world, payload, zip(fqns, grads, strict=True)))})
    ours = ((fqn, state[fqn]) for fqn in payload["shapes"])
    return {
        "steps": steps,
        "parameters": dict(own_rows(rank, world, payload, ours)),
        "buffers": {name: state[name] for name, _ in model.named_buffers()},
    }


def padded_rows(tensor: Tensor, rank: int, world: int) -> Tensor:
    """Rank's rows of ``tensor`` as torch.chunk deals them, zeros below up to the first chunk's size."""
    chunks = torch.chunk(tensor, world)
    padded = torch.zeros_like(chunks[0])
    if rank < len(chunks):
        padded[: len(chunks[rank])] = chunks[rank]
    return padded


def own_rows(rank: int, world: int, payload: Mapping[str, Any], padded: Any) -> Iterator[tuple[str, Tensor]]:
    """``padded`` (name, tensor) pairs without padding."""
    for fqn, tensor in padded:
        chunks = torch.empty(payload["shapes"][fqn][0], 0).chunk(world)
        yield fqn, tensor[: len(chunks[rank]) if rank < len(chunks) else 0].clone()


def graph_once(rank: int, world: int, payload: Any) -> list[Tensor]:
    """What a portable graph gives for the inputs that come with it."""
    graph, inputs = payload
    return list(decode(graph)(*inputs))
