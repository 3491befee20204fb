"""Runs in the ranks: what groups gathers of their own have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pytest_fxbucket.compat.c10d import group_ranks, twin_name
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.step.portable import PortableGraph, decode


def both(rank: int, world: int, graphs: tuple[PortableGraph, PortableGraph]) -> tuple[list[bool], tuple[int, ...], str, int]:
    """Whether each result is the same bit for bit; ranks and back end of the new group, and how many groups there are."""
    before, after = (decode(graph) for graph in graphs)
    ensure_twins(after.graph)
    ensure_twins(after.graph)
    inputs = [torch.arange(6.0).reshape(2, 3) + 7 * rank, torch.arange(12.0).reshape(4, 3) * (rank + 1)]
    results = [graph(*inputs) for graph in (before, after)]
    known = list(dist.distributed_c10d._world.pg_map)
    (twin,) = (group for group in known if group.group_name == twin_name("0"))
    same = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return same, group_ranks("0:gather"), dist.get_backend(twin), len(known)


def crossed(rank: int, world: int, graph: PortableGraph) -> list[list[float]]:
    """What a rank of 4 gathers on the twins of its groups "halves" ([0, 1], [2, 3]) and "strided" ([1, 3], [0, 2])."""
    made = {}
    for name, lists in (("halves", [[0, 1], [2, 3]]), ("strided", [[1, 3], [0, 2]])):
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks:
                made[name] = group.group_name
    decoded = decode(graph)
    for node in decoded.graph.nodes:
        node.args = tuple(f"{made[a.removesuffix(':gather')]}:gather" if isinstance(a, str) else a for a in node.args)
    decoded.recompile()
    ensure_twins(decoded.graph)
    return [result.tolist() for result in decoded(torch.tensor([float(rank)]))]
