"""Runs in the ranks: graphs before and after a pass, compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket.compat.c10d import group_name, twin_name, untwinned
from pytest_fxbucket.compat.pytree import tree_leaves
from pytest_fxbucket.fuzz.inputs_and_outputs import GraphInput, differences, inputs_of
from pytest_fxbucket.fuzz.program import Groups
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.passes.new_nodes import set_argument
from pytest_fxbucket.ranks import mark
from pytest_fxbucket.step.portable import PortableGraph, decode


@dataclass(frozen=True, slots=True)
class FuzzCase:
    """A graph, what passes made of it, and the inputs that they run on."""

    before: PortableGraph
    after: tuple[PortableGraph, ...]
    inputs: tuple[GraphInput, ...]
    seed: int
    groups: Groups = field(default_factory=dict)


def compare(rank: int, world: int, case: FuzzCase) -> list[list[str]]:
    """For each graph after a pass, a sentence for each difference on this rank."""
    names = _groups(rank, case.groups)
    mark("the graph before the pass")
    expected = _run(case.before, inputs_of(case.inputs, case.seed, rank), names, case.seed)
    found = []
    for number, portable in enumerate(case.after):
        mark(f"graph {number + 1} of {len(case.after)} after the pass")
        result = _run(portable, inputs_of(case.inputs, case.seed, rank), names, case.seed)
        found.append([f"rank {rank}: {text}" for text in differences(expected, result)])
    return found


def _groups(rank: int, groups: Groups) -> dict[str, str]:
    """Real name of each group that this rank is in. All ranks make all of them, in one order."""
    names = {}  # new_group is itself collective: a rank must call it for groups that it is not in, too
    for name, lists in sorted(groups.items()):
        for ranks in lists:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                names[name] = group_name(group)
    return names


def _run(portable: PortableGraph, inputs: list[Any], names: Mapping[str, str], seed: int) -> tuple[list[Any], list[Any]]:
    graph_module = decode(portable)
    for node in graph_module.graph.nodes:
        if collectives.launch_kind(node) is not None:
            _rename(node, names)
    # Names of groups are constants in the code of the graph.
    graph_module.recompile()
    ensure_twins(graph_module.graph)
    torch.manual_seed(seed)
    outputs = graph_module(*inputs)
    return tree_leaves(outputs), inputs


def _rename(node: fx.Node, names: Mapping[str, str]) -> None:
    """Let the launch ``node`` run on the real process group of this rank that its name in the graph stands for."""
    said = str(collectives.argument(node, "group_name"))
    if untwinned(said) in names:
        name = names[untwinned(said)]
        name = name if said == untwinned(said) else twin_name(name)
        set_argument(node, "group_name", name)
