"""Passes that leave the step right, and make it slow or fat. All have the call shape of torch's pass.

Each buckets as ours does, and then spoils one thing of a Llama of three layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.passes.manual import manual_overlap_bucketing

Plans = Sequence[str | list[str]]
aten = torch.ops.aten
L0, L1, L2, HEAD = 1, 2, 3, 4
"""Gathers in forward; 0 is of tok_embeddings."""
BACK = 5
"""The first gather in backward."""


def spoiled(change: Callable[[fx.GraphModule], None]) -> Callable[[fx.GraphModule, Plans], fx.GraphModule]:
    """The pass that buckets as ours does, and then does ``change`` to the graph."""

    @wraps(change)
    def made(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
        gm = manual_overlap_bucketing(gm, plans)
        change(gm)
        gm.graph.lint()
        return gm

    return made


def gathers(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if collectives.is_all_gather(node)]


def reductions(gm: fx.GraphModule) -> list[fx.Node]:
    """norm+output, layers from the last, tok_embeddings."""
    return [node for node in gm.graph.nodes if collectives.is_reduce_scatter(node)]


def wait_of(launch: fx.Node) -> fx.Node:
    return next(user for user in launch.users if collectives.is_wait(user))


def launch_at(place: fx.Node, launch: fx.Node) -> None:
    """Move ``launch`` to right before ``place``, with what packs it, which reads nothing but shards."""
    moved: dict[fx.Node, None] = {}
    todo = [launch]
    while todo:
        node = todo.pop()
        if node.op == "call_function":
            moved.pop(node, None)
            moved[node] = None
            todo += node.all_input_nodes
    for node in reversed(moved):
        place.prepend(node)


@spoiled
def untouched(gm: fx.GraphModule) -> None:
    """As good as ours."""


@spoiled
def gather_waited_for_early(gm: fx.GraphModule) -> None:
    launch = gathers(gm)[L2]
    launch.append(wait_of(launch))


@spoiled
def gather_of_the_last_layer_first(gm: fx.GraphModule) -> None:
    """A stream is in order: what is needed last flies first."""
    launch_at(gathers(gm)[L0], gathers(gm)[L2])


def read_from(launch: fx.Node, known: dict[fx.Node, fx.Node]) -> None:
    """Let one reader of what ``launch`` gathers have its own copy of all on the way there, but for what is ``known``."""
    chain = [launch]
    while moves_data(user := list(chain[-1].users)[-1]) or collectives.is_wait(user):
        chain.append(user)
    with launch.graph.inserting_before(user):
        for node in chain:
            known[node] = known.get(node) or launch.graph.node_copy(node, lambda one: known.get(one, one))
    user.replace_input_with(chain[-1], known[chain[-1]])


@spoiled
def gathered_again_for_one_reader(gm: fx.GraphModule) -> None:
    read_from(gathers(gm)[L1], {})


@spoiled
def packs_copied_twice(gm: fx.GraphModule) -> None:
    for launch in reductions(gm):
        pack = launch.all_input_nodes[0]
        with gm.graph.inserting_before(launch):
            again = gm.graph.call_function(aten.clone.default, (pack,))
        again.meta = dict(pack.meta)
        launch.replace_input_with(pack, again)


@spoiled
def reductions_behind_the_optimizer(gm: fx.GraphModule) -> None:
    """All but the first are launched when the updates of that one have run."""
    late = dict.fromkeys(reductions(gm)[1:])
    for node in gm.graph.nodes:
        if node.op != "output" and any(source in late for source in node.all_input_nodes):
            late[node] = None
    for node in [node for node in gm.graph.nodes if node in late]:
        gm.graph.output_node().prepend(node)


@spoiled
def gathers_kept(gm: fx.GraphModule) -> None:
    """Of each layer one reader in backward reads what forward gathered."""
    ours = gathers(gm)
    for again, kept in zip(ours[BACK:], (L2, L1, L0), strict=True):
        read_from(again, {again: ours[kept], wait_of(again): wait_of(ours[kept])})
