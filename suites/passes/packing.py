"""Our pack alone: every launch of a graph into one, and what the graph gives before and after on all ranks at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from pytest_fxbucket.fuzz.inputs_and_outputs import differences
from pytest_fxbucket.fuzz.lockstep import Env, run
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.carried import LaunchContents
from pytest_fxbucket.passes.merge import Merged, build
from pytest_fxbucket.passes.targets import MergeTarget, mergeable


def targets(graph: fx.Graph, ranks: int, direction: Any = "forward") -> list[MergeTarget]:
    """Each launch of ``graph`` as a member of one entry; ``ranks`` are in its process group."""
    order, found = order_of(graph), []
    for place, node in enumerate(n for n in graph.nodes if collectives.launch_kind(n)):
        target = mergeable(node, order, LaunchContents((f"p{place}",), place, direction, entry="a"))
        assert not isinstance(target, str), target
        found.append(replace(target, ranks=ranks))
    return found


def packed(
    graph: fx.Graph, ranks: int, packer: str = "default", foldable: Callable[[fx.Node], bool] = lambda cast: True
) -> Merged:
    """Merge all launches of ``graph`` in place. Launches stand before all readers of what they bring."""
    members = targets(graph, ranks)
    last = [node for node in graph.nodes if node in {member.launch for member in members}][-1]
    with graph.inserting_before(last.next):
        made = build(graph, tuple(members), packer=packer, foldable=foldable)
    results = iter(made.results)
    for part in (part for member in members for part in member.parts):
        result = next(results)
        for wait in part.waits:
            wait.replace_all_uses_with(result)
    gone = {node for member in members for node in (*member.waits, *member.dropped, member.launch)} | set(made.absorbed)
    for node in [node for node in reversed(graph.nodes) if node in gone]:
        graph.erase_node(node)
    graph.lint()
    return made


def integers(graph: fx.Graph, ranks: int, sizes: Sequence[Sequence[int]] = ()) -> list[list[Tensor]]:
    """Inputs by rank: small integers in the dtype of each placeholder, of its strides; ``sizes`` are other shapes."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for _ in range(ranks):
        tensors = []
        for number, node in enumerate(graph.find_nodes(op="placeholder")):
            value = node.meta["val"]
            shape = sizes[number] if sizes else value.shape
            numbers = torch.randint(0, 8, tuple(shape), generator=generator)
            tensors.append(numbers.to(value.dtype))
        inputs.append(tensors)
    return inputs


def assert_same(
    graph: fx.Graph,
    ranks: int,
    packer: str = "default",
    foldable: Callable[[fx.Node], bool] = lambda cast: True,
    sizes: Sequence[Sequence[int]] = (),
) -> tuple[fx.Graph, Merged, Env]:
    """Merge a copy of ``graph`` and hold what it gives against what ``graph`` gives, bits, dtype, shape and strides."""
    after = copy.deepcopy(graph)
    made = packed(after, ranks, packer, foldable)
    envs = [run(g, integers(g, ranks, sizes)) for g in (graph, after)]
    outputs = [env[g.output_node()] for g, env in zip((graph, after), envs, strict=True)]
    for wanted, got in zip(*outputs, strict=True):
        assert [tensor.stride() for tensor in got] == [tensor.stride() for tensor in wanted]
        assert list(differences((wanted, []), (got, []))) == []
    return after, made, envs[1]
