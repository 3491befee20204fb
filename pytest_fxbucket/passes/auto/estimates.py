"""Seconds of nodes that all ranks agree on, before anything moves by them.

A model that measures says something else on every rank, and each time it is asked; ranks that move by other seconds launch in
another order, and wait for each other for ever. So each node is asked for once, and on ranks that really run the median over
all of them is taken. In one process that plays one rank after the other, what the first was told holds for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pytest_fxbucket.compat.c10d import group_ranks, untwinned
from pytest_fxbucket.cost.costs import Roofline
from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.graph.collectives import tensors

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.cost.costs import CostModel

NodeKey = tuple[str, ...]
"""Name and operator of a node; while the graph that it is of may still be thrown away, the number of the try as well."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """What a schedule goes by."""

    cost: CostModel
    cluster: Cluster
    known: dict[NodeKey, float] = field(default_factory=dict)
    """What was asked before; the same for every rank that this process plays."""
    differs: bool = True
    """Whether the model may say other seconds on other ranks; what reckons with sizes alone does not."""
    attempt: tuple[str, ...] = ()
    """Which try this is of one graph, if there may be several: what one makes may have the names of what another made."""

    def of_try(self, number: int) -> Estimates:
        """For try ``number``, from 0."""
        return replace(self, attempt=(str(number),))

    def settle(self) -> None:
        """Take this try's seconds for those of the graph that came out."""
        self.known.update({key[:2]: seconds for key, seconds in list(self.known.items()) if key[2:] == self.attempt})

    def of(self, nodes: Sequence[fx.Node]) -> list[float]:
        """Seconds of each of ``nodes``, all of a graph; where ranks really run all call it with theirs.

        Raises what the cost model does, and :class:`PassError` for ranks that have other nodes.
        """
        keys = [(node.name, str(node.target), *self.attempt) for node in nodes]
        new = {key: self.cost(node) for key, node in zip(keys, nodes, strict=True) if key not in self.known}
        self.known.update(_agreed(new) if self.differs else new)
        return [self.known[key] for key in keys]

    def of_one(self, node: fx.Node) -> float:
        """Seconds of ``node``, which is of no graph that runs."""
        return self.of([node])[0]


def of_cluster(cluster: Cluster) -> Estimates:
    """What ``cluster`` can do, for the process groups that this process knows; of others as many ranks as a launch says."""
    return Estimates(Roofline(cluster, ranks_of_group), cluster, differs=False)


def ranks_of_group(group: str, count: int) -> Sequence[int]:
    """Ranks of ``group``; if it is not known, ``count``, side by side."""
    for name in (group, untwinned(group)):
        with suppress(KeyError, RuntimeError, ValueError):
            return group_ranks(name)
    return range(max(count, 1))


def refuse_symbolic(graph: fx.Graph) -> None:
    """Raise :class:`PlanError` for sizes that are no numbers: seconds and bytes of them are not known."""
    for node in graph.nodes:
        if any(not isinstance(size, int) for one in tensors(node.meta.get("val")) for size in one.shape):
            raise PlanError(
                f'schedule = "auto" goes by sizes, and that of {node.name} is no number: compile with dynamic=False'
            )


def _agreed(seconds: dict[NodeKey, float]) -> dict[NodeKey, float]:
    """The median of ``seconds`` over all ranks; ``seconds`` themselves where this process runs alone or plays its ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return seconds
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, list(seconds.items()))
    mine = list(seconds)
    for rank, items in enumerate(everything):
        theirs = [key for key, _ in items]
        if theirs != mine:
            here, there = next(((a, b) for a, b in zip([*mine, None], [*theirs, None], strict=False) if a != b), (None, None))
            raise PassError(
                f"ranks cannot agree on seconds, since they have other graphs: rank {rank} has {_called(there)} where rank "
                f"{dist.get_rank()} has {_called(here)}"
            )
    columns = zip(*([value for _, value in items] for items in everything), strict=True)
    return dict(zip(mine, map(median, columns), strict=True))


def _called(key: NodeKey | None) -> str:
    return f"{key[0]} ({key[1]})" if key else "nothing"
