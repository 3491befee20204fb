"""Two parameters of equal shape trade gradients in the update."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import inputs, next_alike, results, trade

if TYPE_CHECKING:
    from torch import fx


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Pairs of gradients that the update reads, with all that reads them there."""
    updating = seen.reading.updating_names
    gradients = [one.node for one in results(seen, "grad")] + list(inputs(seen, "grad").values())

    def readers(node: fx.Node) -> list[str]:
        return [user.name for user in node.users if user.name in updating]

    for first, second in next_alike(seen, [node for node in gradients if readers(node)]):
        both = dict.fromkeys([*readers(first), *readers(second)])
        # After the trade each reads the other's gradient, which must stand before it.
        made = max(seen.place[first], seen.place[second])
        if all(seen.place[seen.nodes[name]] > made for name in both):
            yield Site(
                first.name, f"and {second.name} change places in updates", partial(trade, first.name, second.name, tuple(both))
            )
