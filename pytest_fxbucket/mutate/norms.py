"""Norms that gradients are clipped by: their sums over ranks, among all other all-reduces."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import tensors_sent, waits_of
from pytest_fxbucket.graph.compute import is_reduced
from pytest_fxbucket.graph.walks import reached, readers_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.mutate.operator import Seen


def other_sums(seen: Seen) -> Iterator[tuple[fx.Node, bool]]:
    """(launch, whether it sums norms for an update) of every all-reduce of one tensor that is no gradient."""
    updating = {seen.nodes[name] for name in seen.reading.updating_names}
    for bucket in seen.reading.buckets:
        launch = seen.nodes[bucket.node]
        if bucket.kind == "all_reduce" and not any(bucket.fqns) and len(tensors_sent(launch)) == 1 and waits_of(launch):
            yield launch, _is_of_norms(launch) and not updating.isdisjoint(readers_of([launch]))


def _is_of_norms(launch: fx.Node) -> bool:
    """Whether all that ``launch`` sends is made of numbers that tensors were reduced to."""
    made = reached(tensors_sent(launch), lambda node: () if is_reduced(node) else node.all_input_nodes)
    return all(is_reduced(node) or node.all_input_nodes for node in made)


def is_norm(node: fx.Node) -> bool:
    """Whether ``node`` is one number that a tensor was reduced to, one of a list of them too."""
    return is_reduced(node.all_input_nodes[0] if node.target is getitem else node)
