"""What is written in place goes into a copy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.graph.storages import base
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import writes


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every write."""
    for writer, target in writes(seen):
        how = f"writes a copy instead of {base(target).name}"
        yield Site(writer.name, how, partial(_copy, writer.name, target.name))


def _copy(writer: str, target: str, broken: BrokenGraph) -> None:
    copied = broken.before(broken[writer], torch.ops.aten.clone.default, broken[target])
    broken[writer].replace_input_with(broken[target], copied)
