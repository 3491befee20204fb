"""Updates of parameters left out, doubled, or by other gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import give, give_nodes, inputs, interchangeable, next_alike, renewed, results, trade

if TYPE_CHECKING:
    from torch import fx


def update_doubled(seen: SeenGraph) -> Iterator[Site]:
    """A parameter is updated by twice as much.

    Every parameter that is returned anew.
    """
    for (place, new, value), old in renewed(seen, "param"):
        if interchangeable(old, new):
            yield Site(
                new.name, f"is added again to {value.fqn}, less what that was", partial(_double, old.name, new.name, place)
            )


def _double(old: str, new: str, place: int, broken: BrokenGraph) -> None:
    aten = torch.ops.aten
    update = broken.behind(broken[new], aten.sub.Tensor, broken[new], broken[old])
    twice = broken.behind(update, aten.add.Tensor, broken[new], update)
    give_nodes({place: twice}, broken)


def update_skipped(seen: SeenGraph) -> Iterator[Site]:
    """One parameter and its state are left as they were by the update.

    Every parameter that is returned anew.
    """
    made = list(renewed(seen, "param", "state"))
    for (_, node, parameter), _ in made:
        name = parameter.fqn
        if parameter.role == "param":
            # State is named below its parameter.
            own = {one.place: old.name for one, old in made if name in (one.value.fqn, one.value.fqn.rpartition(".")[0])}
            yield Site(node.name, f"is not returned: {name} and its state stay as they were", partial(give, own))


def update_wrong_gradient(seen: SeenGraph) -> Iterator[Site]:
    """Two parameters of equal shape trade gradients in the update.

    Pairs of gradients that the update reads, with all that reads them there.
    """
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
