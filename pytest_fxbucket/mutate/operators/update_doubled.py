"""A parameter is updated by twice as much."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import give_nodes, interchangeable, renewed


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every parameter that is returned anew."""
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
