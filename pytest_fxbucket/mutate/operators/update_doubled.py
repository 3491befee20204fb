"""A parameter is updated by twice as much."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import give_nodes, inputs, interchangeable, results


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every parameter that is returned anew."""
    before = inputs(seen, "param")
    for place, new, value in results(seen, "param"):
        old = before.get(value.fqn)
        if old is not None and old is not new and interchangeable(old, new):
            yield Site(
                new.name, f"is added again to {value.fqn}, less what that was", partial(_double, old.name, new.name, place)
            )


def _double(old: str, new: str, place: int, broken: BrokenGraph) -> None:
    aten = torch.ops.aten
    update = broken.behind(broken[new], aten.sub.Tensor, broken[new], broken[old])
    twice = broken.behind(update, aten.add.Tensor, broken[new], update)
    give_nodes({place: twice}, broken)
