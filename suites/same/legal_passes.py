"""Passes that change the schedule and no value. All have the call shape of torch's pass."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.manual import manual_overlap_bucketing

Plans = Sequence[str | list[str]]
aten = torch.ops.aten


def untouched(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return gm


def shuffled_1(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _shuffled(gm, 1)


def shuffled_again(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return manual_overlap_bucketing(_shuffled(manual_overlap_bucketing(gm, plans), 3), plans)


def written_out(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Defaults stand where they were left out, and aliases where nothing was."""
    gm = manual_overlap_bucketing(gm, plans)
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.kwargs = {"alpha": 1, **node.kwargs}
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        with gm.graph.inserting_after(node):
            alias = gm.graph.call_function(aten.detach.default, (node,))
        alias.meta = dict(node.meta)
        node.replace_all_uses_with(alias, delete_user_cb=lambda user, alias=alias: user is not alias)
    return gm


def gathered_anew(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """For each reader of its own."""
    for wait in list(gm.graph.nodes):
        if not collectives.is_wait(wait) or not collectives.is_all_gather(wait.all_input_nodes[0]):
            continue
        for user in list(wait.users)[1:]:
            with gm.graph.inserting_before(user):
                launch = gm.graph.node_copy(wait.all_input_nodes[0], lambda n: n)
                again = gm.graph.node_copy(wait, lambda n, launch=launch: launch)
            user.replace_input_with(wait, again)
    return gm


def crosswise(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Legal on each rank by itself: on odd ones two gathers of one shape change places."""
    return _gathers_traded(gm) if dist.get_rank() % 2 else gm


def gathers_traded_on_rank_3(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _gathers_traded(gm) if dist.get_rank() == 3 else gm


def _gathers_traded(gm: fx.GraphModule) -> fx.GraphModule:
    first, second = _neighbours(gm, "all_gather")
    for node in (second.all_input_nodes[0], second):  # what they send are inputs
        first.all_input_nodes[0].prepend(node)
    return gm


def sums_traded_on_rank_2(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Of two gradients of one shape, over the ranks that have copies."""
    if dist.get_rank() == 2:
        first, second = _neighbours(gm, "all_reduce")
        for node in (first, first.all_input_nodes[0]):  # only the output reads them
            second.append(node)
    return gm


def _neighbours(gm: fx.GraphModule, kind: str) -> list[fx.Node]:
    """The waits for the first two launches of ``kind``, one behind the other, that are of one shape."""
    waits = [n for n in gm.graph.nodes if collectives.is_wait(n) and collectives.launch_kind(n.all_input_nodes[0]) == kind]
    shapes = [tuple(wait.meta["val"].shape) for wait in waits]
    place = next(i for i, shape in enumerate(shapes[:-1]) if shapes[i + 1] == shape)
    return waits[place : place + 2]


def forward_of_my_own(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Its graph is right, and nobody who calls it runs that."""
    gm = manual_overlap_bucketing(gm, plans)
    gm.forward = lambda *args: args
    return gm


def _shuffled(gm: fx.GraphModule, seed: int) -> fx.GraphModule:
    """In a random order that keeps what must be kept, in which no launch passes another one."""
    chance, order = random.Random(seed), order_of(gm.graph)
    waiting = {i: set(before) for i, before in enumerate(order.before)}
    last = None
    for i, node in enumerate(order.nodes):
        if collectives.launch_kind(node) is not None:
            if last is not None:
                waiting[i].add(last)
            last = i
    users: dict[int, list[int]] = {}
    for i, before in waiting.items():
        for one in before:
            users.setdefault(one, []).append(i)
    inputs = [i for i, node in enumerate(order.nodes) if node.op == "placeholder"]
    ready, found = [i for i, before in waiting.items() if not before and i not in inputs], list(inputs)
    for i in inputs:
        _free(i, users, waiting, ready)
    while ready:
        i = ready.pop(chance.randrange(len(ready)))
        found.append(i)
        _free(i, users, waiting, ready)
    graph, made = fx.Graph(), {}
    for i in sorted(found, key=lambda i: (order.nodes[i].op == "output", found.index(i))):
        made[order.nodes[i]] = graph.node_copy(order.nodes[i], made.__getitem__)
    graph.lint()
    return fx.GraphModule(gm, copy.deepcopy(graph))


def _free(i: int, users: dict[int, list[int]], waiting: dict[int, set[int]], ready: list[int]) -> None:
    for user in users.get(i, ()):
        waiting[user].discard(i)
        if not waiting[user]:
            ready.append(user)
