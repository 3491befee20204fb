"""A gradient is what one rank alone made: what was sent to be reduced, not what came back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.collectives import REDUCTIONS, is_wait, launch_kind
from pytest_fxbucket.mutate.launches import plain_launches
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import results, tensor

if TYPE_CHECKING:
    from torch import fx


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every returned gradient of which all steps back to its reduction have one input each."""
    sent_by = {launch: sent for launch, sent in plain_launches(seen) if launch_kind(launch) in REDUCTIONS}
    for _, node, value in results(seen, "grad"):
        *unpacked, wait = _back_to_wait(node)
        if is_wait(wait) and (sent := sent_by.get(wait.all_input_nodes[0])) is not None:
            change = partial(_unreduced, [one.name for one in reversed(unpacked)], wait.name, sent.name)
            yield Site(node.name, f"is not what was reduced, but what was sent, for {value.fqn}", change)


def _back_to_wait(node: fx.Node) -> list[fx.Node]:
    steps = [node]
    while not is_wait(steps[-1]) and len(steps[-1].all_input_nodes) == 1:
        steps.append(steps[-1].all_input_nodes[0])
    return steps


def _unreduced(unpacked: list[str], wait: str, sent: str, broken: BrokenGraph) -> None:
    last = broken[unpacked[-1] if unpacked else wait]
    arrived, own = tensor(broken[wait]), broken[sent]
    assert arrived is not None
    place = last.next
    # A reduce-scatter brings a part of what is sent; here it is the first rows, as on the first rank.
    if (whole := tensor(own)) is not None and whole.shape != arrived.shape:
        own = broken.before(place, torch.ops.aten.slice.Tensor, own, 0, 0, arrived.shape[0])
    made = {broken[wait]: own}
    readers = list(last.users)
    # The unpack is copied and not changed: other gradients of the bucket are cut out of the same nodes.
    with broken.graph.inserting_before(place):
        for name in unpacked:
            made[broken[name]] = broken.graph.node_copy(broken[name], lambda node: made[node])
    for reader in readers:
        reader.replace_input_with(last, made[last])
