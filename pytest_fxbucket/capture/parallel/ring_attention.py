"""Ring attention (arXiv 2310.01889): keys and values go round the ranks of cp, while each attends to those that it has.

Blocks are merged by their logsumexp in float32 as in torch's own context parallelism, so bits are the same. There, a causal
rank leaves out blocks that lie behind its own. Here it computes them and drops the result. That takes no longer, since the last
rank needs all blocks and the others wait for it. So one graph serves all ranks, except for the neighbours that they send to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.graph.collectives import argument, launch_kind, rows_exchanged
from pytest_fxbucket.step.mesh import Group, Mesh
from pytest_fxbucket.step.portable import own_copy
from pytest_fxbucket.step.roles import StepGraph

HEADS, SEQUENCE = 1, 2
"""Dimensions of queries, keys and values, (batch, heads, sequence, head_dim)."""
Tensors = Sequence[torch.Tensor]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ranks of ``group``.

    All are parts of SEQUENCE, in order of ranks; keys and values may have fewer heads than queries. ``place`` is this rank's
    index, a tensor. In backward keys and values go round again, and their gradients with them, in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Group,
        place: torch.Tensor,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Values as of whole sequences, of the shape of ``query``."""
        near: Tensors = (key, value)
        sent = _send(near, group)
        out, logsumexp = _attend(query, near, is_causal, scale)
        for turn in range(1, group.size):
            near = _arrived(sent, near)
            if turn + 1 < group.size:
                sent = _send(near, group)
            # After ``turn`` turns a rank has the block of the rank ``turn`` places before it. For the first ``turn`` ranks that
            # is one from the end of the sequence, which causal queries do not see.
            merged = _merged(out, logsumexp, *_attend(query, near, False, scale))
            out, logsumexp = merged if not is_causal else _where(place >= turn, merged, (out, logsumexp))
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, logsumexp.squeeze(-1), place)
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        query, key, value, out, logsumexp, place = ctx.saved_tensors
        group: Group = ctx.group
        near: Tensors = (key, value)
        sent = _send(near, group)
        zeros = [torch.zeros_like(one, dtype=torch.float32) for one in (query, key, value)]
        sums = _sums(zeros, _attend_backward(gradient, query, near, out, logsumexp, ctx.is_causal, ctx.scale))
        # The sums for keys and values travel one turn behind their block. Each rank adds its share; the last send is home.
        home = _send(sums[1:], group)
        for turn in range(1, group.size):
            near = _arrived(sent, near)
            if turn + 1 < group.size:
                sent = _send(near, group)
            found = _attend_backward(gradient, query, near, out, logsumexp, False, ctx.scale)
            if ctx.is_causal:
                found = _where(place >= turn, found, [torch.zeros_like(one) for one in found])
            sums = _sums([sums[0], *_arrived(home, sums[1:])], found)
            home = _send(sums[1:], group)
        of_query, of_key, of_value = (one.to(query.dtype) for one in (sums[0], *_arrived(home, sums[1:])))
        return of_query, of_key, of_value, None, None, None, None


def _attend(query: torch.Tensor, near: Tensors, is_causal: bool, scale: float | None) -> Tensors:
    """Attention to one block, and its logsumexp, (batch, heads, sequence, 1); both in float32."""
    whole = [_for_all(one, query.shape[HEADS]) for one in near]
    out, logsumexp = _flash(query, *whole, 0.0, is_causal, scale=scale)
    return out.float(), logsumexp.unsqueeze(-1)


def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    near: Tensors,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> Tensors:
    """What one block adds to the gradients of queries, keys and values; ``out`` and ``logsumexp`` are of all blocks."""
    heads, own = query.shape[HEADS], near[0].shape[HEADS]
    # The kernel makes a block's softmax again from the logsumexp of all blocks, so what blocks give can be added up.
    whole = [_for_all(one, heads) for one in near]
    of_query, *others = _flash_backward(gradient, query, *whole, out, logsumexp, 0.0, is_causal, scale=scale)
    return [of_query, *(one.unflatten(HEADS, (own, -1)).sum(HEADS + 1) for one in others)]


def _for_all(few: torch.Tensor, heads: int) -> torch.Tensor:
    """``few`` heads, each as often as queries share it."""
    return few if few.shape[HEADS] == heads else few.repeat_interleave(heads // few.shape[HEADS], HEADS)


def _merged(
    out: torch.Tensor, logsumexp: torch.Tensor, block: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to what ``out`` has seen and to one more block, and the logsumexp of both."""
    # exp(weight) / (exp(weight) + exp(logsumexp)): the block's share of the softmax, in a form that cannot overflow.
    share = torch.sigmoid(weight - logsumexp)
    return out - share * (out - block), logsumexp - F.logsigmoid(logsumexp - weight)


def _sums(these: Tensors, those: Tensors) -> Tensors:
    return [one + other for one, other in zip(these, those, strict=True)]


def _where(seen: torch.Tensor, these: Tensors, those: Tensors) -> Tensors:
    return [torch.where(seen, one, other) for one, other in zip(these, those, strict=True)]


# What goes round: all tensors as one message, one launch a turn, before the block is computed; its wait is behind the block.


def _send(tensors: Tensors, group: Group) -> torch.Tensor:
    """Send ``tensors`` on, as the first rank does: to the next rank, and from the last one. The result is not waited for."""
    flat = torch.cat([one.reshape(-1) for one in tensors])
    launched: torch.Tensor = c10d_functional().all_to_all_single(flat, *_splits(flat.numel(), group.size, 0), group.name)
    return launched


def _arrived(sent: torch.Tensor, like: Tensors) -> Tensors:
    flat = c10d_functional().wait_tensor(sent)
    parts = flat.split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _splits(numel: int, size: int, place: int) -> tuple[list[int], list[int]]:
    """Elements that the rank ``place`` of ``size`` receives of each rank, and that it sends to each: from one to the next."""
    received, sent = [0] * size, [0] * size
    received[place - 1] = sent[(place + 1) % size] = numel
    return received, sent


def at_place(step: StepGraph, mesh: Mesh, rank: int) -> StepGraph:
    """``step``, which the first rank traced, as ``rank`` runs it: with its own neighbours in place of the first rank's."""
    group, place = mesh.group("cp"), mesh.at(rank, "cp")
    graphs = {phase: own_copy(module) for phase, module in step.graphs.items()}
    for module in graphs.values():
        for node in module.graph.nodes:
            if launch_kind(node) == "all_to_all" and argument(node, "group_name") == group.name:
                flat, *_, name = node.args
                node.args = flat, *_splits(sum(rows_exchanged(node)[0]), group.size, place), name
        module.recompile()
    return replace(step, graphs=graphs, rank=rank)
