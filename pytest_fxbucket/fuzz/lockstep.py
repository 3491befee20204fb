"""Runs a graph on all ranks at once in this process, each up to the next launch or wait, its values beside the others'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.fuzz.inputs_and_outputs import differences, graph_inputs, has_symbolic, inputs_of
from pytest_fxbucket.fuzz.program import Groups
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.keep_order import launch_of

Env = dict[fx.Node, list[Any]]
"""What each node holds, by rank."""


def run(
    graph: fx.Graph | Sequence[fx.Node],
    inputs: Sequence[Sequence[Any]],
    groups: Groups | None = None,
    *,
    late: bool = False,
    own: Sequence[fx.Graph] = (),
) -> Env:
    """Run ``graph``, or nodes of one in an order; ``inputs`` are by rank. The output node holds what is returned.

    ``own``: the graph of each rank, if they are not all ``graph``, which is then the first; see :func:`is_alike`.

    ``groups`` are those that the graph names besides ``"0"``, all ranks. A collective may read what it sends, and write what it
    brings, at any time in flight: here when it is launched or, with ``late``, when it is first waited for.
    """
    # The ranks' tensors lie side by side, so a collective is a copy between them and needs no process group. Early, its result
    # is there at the launch. Late, a new result holds junk and a buffer its old content until the first wait, and what is sent
    # is read only then. A legal graph gives the same bits both ways; a race shows as a difference.
    world = len(inputs)
    shared = list(graph.nodes if isinstance(graph, fx.Graph) else graph)
    left = [iter(list(one.nodes)) for one in own] or [iter(shared) for _ in inputs]
    given = [iter(one) for one in inputs]
    env: Env = defaultdict(lambda: [None] * world)
    flying: dict[fx.Node, tuple[collectives.Launch, Sequence[fx.Node]]] = {}
    # What a rank draws is its own, however far the others are.
    seeds = [torch.Generator().manual_seed(torch.initial_seed() + rank).get_state() for rank in range(world)]
    while True:
        # Each rank runs up to its next launch or wait, and there it meets the others.
        nodes: list[fx.Node] = []
        for rank in range(world):
            torch.set_rng_state(seeds[rank])
            nodes += _advanced(env, left[rank], given[rank], rank)
            seeds[rank] = torch.get_rng_state()
        if not nodes:
            ends = [one.output_node() for one in own]
            if ends:
                _put(env, ends[:1] * world, _held(env, ends))
            return env
        launch = collectives.read_launch(nodes[0])
        if launch is None:
            _put(env, nodes, _held(env, [node.args[0] for node in nodes]))
            source = launch_of(nodes[0])  # or an earlier wait
            if late and source in flying:
                _land(env, *flying.pop(source), groups or {})
            continue
        buffers = [_buffer(node, launch) for node in nodes]
        is_new = buffers[0] is None
        _put(env, nodes, _exchanged(env, launch, nodes, groups or {}) if is_new else _held(env, buffers))
        if late and is_new:
            _spoil(_held(env, nodes))
        # Early, a buffer is filled at the launch, and nothing is left to do at the wait.
        if is_new or late:
            flying[nodes[0]] = launch, nodes
        else:
            _land(env, launch, nodes, groups or {})


def is_alike(first: fx.Graph, other: fx.Graph) -> bool:
    """Whether two ranks' graphs launch and wait for the same in the same order: what else they run may differ."""
    return _meetings(first) == _meetings(other)


def _meetings(graph: fx.Graph) -> list[tuple[object, int]]:
    """Each launch and wait by its operator, a wait with the number of its launch."""
    found: list[tuple[object, int]] = []
    number: dict[fx.Node | None, int] = {}
    for node in graph.nodes:
        if _meets(node):
            number[node] = len(found)
            found.append((node.target, number.get(launch_of(node), -1) if collectives.is_wait(node) else -1))
    return found


def _meets(node: fx.Node) -> bool:
    return collectives.is_wait(node) or collectives.read_launch(node) is not None


def _advanced(env: Env, left: Iterator[fx.Node], given: Iterator[Any], rank: int) -> Iterator[fx.Node]:
    """Run what ``rank`` has ``left`` up to its next launch or wait, which is given; nothing at the end."""
    for node in left:
        if _meets(node):
            yield node
            return
        if node.op == "placeholder":
            env[node][rank] = next(given)
        elif node.op == "output":
            env[node][rank] = _of_rank(env, node.args[0], rank)
        else:
            env[node][rank] = _called(env, node, rank)


def _held(env: Env, nodes: Sequence[Any]) -> list[Any]:
    return [env[node][rank] for rank, node in enumerate(nodes)]


def _put(env: Env, nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
    for rank, (node, value) in enumerate(zip(nodes, values, strict=True)):
        env[node][rank] = value


def _called(env: Env, node: fx.Node, rank: int) -> Any:
    assert callable(node.target)
    return node.target(*_of_rank(env, node.args, rank), **_of_rank(env, node.kwargs, rank))


def _of_rank(env: Env, argument: Any, rank: int) -> Any:
    return torch.fx.node.map_arg(argument, lambda node: env[node][rank])


def _buffer(node: fx.Node, launch: collectives.Launch) -> Any:
    """The buffer that ``node``, a launch as ``launch`` is, writes its result to; None if its result is a new tensor."""
    if launch.operator.endswith("_out"):
        return collectives.argument(node, "out")
    return collectives.argument(node, "input") if launch.operator.endswith("_") else None


def _spoil(brought: Sequence[Any]) -> None:
    """Fill each rank's result with junk, so that a read before the wait shows."""
    for mine in brought:
        for tensor in collectives.tensors(mine):
            # In each of the drawn dtypes this is a number, and none that drawn values come to.
            tensor.view(-1).view(torch.uint8).fill_(0x81)


def _land(env: Env, launch: collectives.Launch, nodes: Sequence[fx.Node], groups: Groups) -> None:
    """Write what ``launch`` brings to where each rank expects it."""
    for mine, brought in zip(_held(env, nodes), _exchanged(env, launch, nodes, groups), strict=True):
        for old, new in zip(collectives.tensors(mine), collectives.tensors(brought), strict=True):
            old.copy_(new)


def _exchanged(env: Env, launch: collectives.Launch, nodes: Sequence[fx.Node], groups: Groups) -> list[Any]:
    """What each rank gets; ``nodes``: the launch in each rank's graph."""
    got: dict[int, Any] = {}
    for members in groups.get(untwinned(launch.group), [range(len(nodes))]):
        sent = [_of_rank(env, collectives.sent_by(nodes[rank]), rank) for rank in members]
        if isinstance(sent[0], (list, tuple)):
            parts = [_exchange(launch, list(column)) for column in zip(*sent, strict=True)]
            brought: list[Any] = [list(row) for row in zip(*parts, strict=True)]
        else:
            brought = _exchange(launch, sent)
        got.update(zip(members, brought, strict=True))
    return [got[rank] for rank in range(len(nodes))]


def _exchange(said: collectives.Launch, sent: list[Tensor]) -> list[Tensor]:
    """What each rank gets: contiguous, in a storage of its own, as of torch's functional collectives."""
    ranks = len(sent)
    said_ranks = collectives.argument(said.node, "group_size")
    assert said_ranks in (None, ranks)
    sent = [tensor.clone(memory_format=torch.contiguous_format) for tensor in sent]  # one element may have any stride
    if said.kind == "all_gather":
        whole = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in sent]).view(sent[0].dtype)
        return [whole.clone().view(sent[0].shape[0] * ranks, *sent[0].shape[1:]) for _ in sent]
    if said.kind == "all_to_all":
        rows = [tensor.chunk(ranks) for tensor in sent]
        return [torch.cat([row[rank] for row in rows]) for rank in range(ranks)]
    if said.kind == "broadcast":
        root: Any = collectives.argument(said.node, "src")
        return [sent[root].clone() for _ in sent]
    total = sent[0].clone()
    for other in sent[1:]:
        total = torch.maximum(total, other) if said.op == "max" else total + other
    total = total / ranks if said.op == "avg" else total
    if said.kind == "all_reduce":
        return [total.clone() for _ in sent]
    assert total.shape[0] % ranks == 0
    return [chunk.clone() for chunk in total.chunk(ranks)]


def compare(
    before: fx.GraphModule,
    after: fx.GraphModule,
    world: int,
    groups: Groups | None = None,
    own: Sequence[fx.Graph] = (),
) -> list[str]:
    """What differs between the two on any of ``world`` ranks, as of :func:`pytest_fxbucket.fuzz.on_ranks.compare`.

    ``own`` is as of :func:`run`, of the graph ``after``. Symbolic sizes are once as traced, and once twice that.
    """
    # The program runs early alone: it is legal by construction, so its bits do not depend on when collectives are done.
    found = []
    for times in (1, 2) if has_symbolic(before) else (1,):
        results = []
        for one, late in ((before, False), (after, False), (after, True)):
            # Made and seeded anew for each run: it may write its inputs, and must draw the same random numbers.
            inputs = [inputs_of(tuple(graph_inputs(before, times)), 0, rank) for rank in range(world)]
            torch.manual_seed(0)
            mine = own if one is after else ()
            outputs = run(one.graph, inputs, groups, late=late, own=mine)[one.graph.output_node()]
            results.append(list(zip(outputs, inputs, strict=True)))
        first, *others = results
        pairs = [(rank, first[rank], other[rank]) for other in others for rank in range(world)]
        found += [f"rank {rank}: {text}" for rank, one, other in pairs for text in differences(one, other)]
    return found
