"""What the last rank sends is another number than its graph's on all other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.mutate.launches import flights
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site

_MORE = 1 + 2**-6
"""Enough for bfloat16, which has 8 bits."""


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch of floating point numbers."""
    for flight in flights(seen):
        if flight.sent is not None and flight.sent.meta["val"].dtype.is_floating_point:
            how = f"sends {_MORE} times what it should"
            yield Site(flight.launch.name, how, partial(_scale, flight.launch.name), on_last_rank=True)


def _scale(name: str, broken: BrokenGraph) -> None:
    launch = broken[name]
    sent = launch.all_input_nodes[0]
    launch.replace_input_with(sent, broken.before(launch, torch.ops.aten.mul.Tensor, sent, _MORE))
