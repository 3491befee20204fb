"""Runs a graph on all ranks at once in this process: node by node, each rank's value beside the others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pytest_fxbucket.graph import collectives

Env = dict[fx.Node, list[Any]]
"""What each node holds, by rank."""


def run(graph: fx.Graph, inputs: Sequence[Sequence[Any]]) -> Env:
    """Run ``graph``; ``inputs`` are by rank. The output node holds what is returned."""
    env: Env = {}
    given = [list(column) for column in zip(*inputs, strict=True)]
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = given.pop(0)
        elif node.op == "output":
            env[node] = [_of_rank(env, node.args[0], rank) for rank in range(len(inputs))]
        elif collectives.launch_kind(node):
            env[node] = _launch(node, [_of_rank(env, collectives.sent_by(node), rank) for rank in range(len(inputs))])
        elif collectives.is_wait(node):
            env[node] = env[node.args[0]]
        else:
            env[node] = [
                node.target(*_of_rank(env, node.args, rank), **_of_rank(env, node.kwargs, rank)) for rank in range(len(inputs))
            ]
    return env


def _of_rank(env: Env, argument: Any, rank: int) -> Any:
    return torch.fx.node.map_arg(argument, lambda node: env[node][rank])


def _launch(node: fx.Node, sent: list[Any]) -> list[Any]:
    said = collectives.read_launch(node)
    assert said is not None
    if isinstance(sent[0], (list, tuple)):
        parts = [_exchange(said, list(column)) for column in zip(*sent, strict=True)]
        return [list(row) for row in zip(*parts, strict=True)]
    return _exchange(said, sent)


def _exchange(said: collectives.Launch, sent: list[Tensor]) -> list[Tensor]:
    """What each rank gets: contiguous, in a storage of its own, as of torch's functional collectives."""
    ranks = len(sent)
    said_ranks = collectives.argument(said.node, "group_size")
    assert said_ranks in (None, ranks)
    sent = [tensor.contiguous() for tensor in sent]
    if said.kind == "all_gather":
        whole = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in sent]).view(sent[0].dtype)
        return [whole.clone().view(sent[0].shape[0] * ranks, *sent[0].shape[1:]) for _ in sent]
    total = sent[0].clone()
    for other in sent[1:]:
        total = torch.maximum(total, other) if said.op == "max" else total + other
    total = total / ranks if said.op == "avg" else total
    if said.kind == "all_reduce":
        return [total.clone() for _ in sent]
    assert total.shape[0] % ranks == 0
    return [chunk.clone() for chunk in total.chunk(ranks)]
