"""A gradient is twice as large."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import put_behind, results


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every returned gradient, reduced or not yet."""
    for _, node, value in results(seen, "grad", "unreduced"):
        yield Site(node.name, f"is doubled, the gradient of {value.fqn}", partial(_double, node.name))


def _double(name: str, broken: BrokenGraph) -> None:
    node = broken[name]
    put_behind(node, broken.behind(node, torch.ops.aten.mul.Tensor, node, 2.0))
