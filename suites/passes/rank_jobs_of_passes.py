"""Runs in the ranks: graphs before and after a pass, compared bit for bit; and what groups gathers of their own have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pytest_fxbucket.checks.bitwise.job import bits
from pytest_fxbucket.compat.c10d import group_name, group_ranks, twin_name, untwinned
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.ranks import mark
from pytest_fxbucket.step.portable import PortableGraph, decode

Groups = Mapping[str, Sequence[Sequence[int]]]
"""By the name that graphs use: who talks to whom. Each rank is in one list of each name; the lists are of one length."""


@dataclass(frozen=True, slots=True)
class Given:
    """One input as the graph's fake value has it. Inputs of one ``storage`` share it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int


@dataclass(frozen=True, slots=True)
class Case:
    """A graph, what passes made of it, and the inputs that they run on."""

    before: PortableGraph
    after: tuple[PortableGraph, ...]
    inputs: tuple[Given, ...]
    seed: int
    groups: Groups = field(default_factory=dict)


def compare(rank: int, world: int, case: Case) -> list[list[str]]:
    """For each graph after a pass what differs on this rank; a sentence each."""
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
    names = {}
    for name, lists in sorted(groups.items()):
        for ranks in lists:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                names[name] = group_name(group)
    return names


def inputs_of(inputs: Sequence[Given], seed: int, rank: int) -> list[Tensor]:
    """Integers from -4 to 4, other ones on each rank; the same each time."""
    sizes: dict[int, int] = {}
    for given in inputs:
        reach = sum((size - 1) * stride for size, stride in zip(given.shape, given.strides, strict=True))
        sizes[given.storage] = max(sizes.get(given.storage, 0), given.offset + max(0, reach) + 1)
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    numbers = {storage: torch.randint(-4, 5, (size,), generator=generator) for storage, size in sorted(sizes.items())}
    storages: dict[tuple[int, torch.dtype], Tensor] = {}
    made = []
    for given in inputs:
        key = (given.storage, given.dtype)
        storages.setdefault(key, numbers[given.storage].to(given.dtype))
        made.append(storages[key].as_strided(given.shape, given.strides, given.offset))
    return made


def _run(portable: PortableGraph, inputs: list[Any], names: Mapping[str, str], seed: int) -> tuple[list[Any], list[Any]]:
    graph_module = decode(portable)
    for node in graph_module.graph.nodes:
        if collectives.launch_kind(node) is not None:
            _rename(node, names)
    graph_module.recompile()
    ensure_twins(graph_module.graph)
    torch.manual_seed(seed)
    outputs = graph_module(*inputs)
    return tree_leaves(outputs), inputs


def _rename(node: fx.Node, names: Mapping[str, str]) -> None:
    """Let the launch ``node`` run on this rank's group of the name that it says."""
    said = str(collectives.argument(node, "group_name"))
    if untwinned(said) in names:
        name = names[untwinned(said)]
        name = name if said == untwinned(said) else twin_name(name)
        arguments = [argument.name for argument in overload(node)._schema.arguments]
        place = arguments.index("group_name")
        if place < len(node.args):
            node.update_arg(place, name)
        else:
            node.update_kwarg("group_name", name)


def differences(first: tuple[list[Any], list[Any]], second: tuple[list[Any], list[Any]]) -> Iterator[str]:
    """A sentence for each output, or input as it was left, that is not the same bit for bit."""
    if len(first[0]) != len(second[0]):
        yield f"{len(first[0])} outputs before the pass, {len(second[0])} after it"
        return
    for what, before, after in zip(("output", "input"), first, second, strict=True):
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            text = _difference(a, b)
            if text:
                yield f"{what} {number} {text}"


def _difference(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if type(a) is type(b) and a == b else f"is {a!r} before the pass, {b!r} after it"
    for what, x, y in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", a.dtype, b.dtype),
        ("strides", _strides(a), _strides(b)),
    ):
        if x != y:
            return f"has {what} {x} before the pass, {y} after it"
    unequal = (bits(a) != bits(b)).nonzero().reshape(-1).tolist()
    if not unequal:
        return ""
    first = unequal[0]
    x, y = (flat[first].item() for flat in (a.reshape(-1), b.reshape(-1)))
    return f"differs in {len(unequal)} of {a.numel()} elements, first at {first}: {x} before the pass, {y} after it"


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides that tell where an element lies: of one element or none they do not matter."""
    return (
        tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1) if tensor.numel() else ()
    )


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
