"""Compute that reads a parameter itself, which no launch brought: of replicated parameters, and of an optimizer's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.movement import moves_data

if TYPE_CHECKING:
    from torch import fx


def direct_reads(parameters: Mapping[fx.Node, str]) -> Iterator[tuple[fx.Node, str]]:
    """(compute, FQN) of each node that reads one of ``parameters``, through what only moves or casts its data."""
    for parameter, fqn in parameters.items():
        queue = [parameter]
        seen = {parameter}
        for node in queue:
            for user in node.users:
                if computes(user):
                    yield user, fqn
                elif user not in seen and moves_data(user):
                    seen.add(user)
                    queue.append(user)
