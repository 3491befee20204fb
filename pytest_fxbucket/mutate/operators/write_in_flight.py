"""What a collective sends, or fills, is written between its launch and its wait."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.mutate.launches import flights
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch of one tensor that is waited for: what it sends, and what it fills."""
    for flight in flights(seen):
        if flight.sent is not None and flight.waits:
            name = flight.launch.name
            yield Site(name, f"sends {flight.sent.name}, which is written meanwhile", partial(_write, name, flight.sent.name))
            yield Site(name, "fills what is written meanwhile", partial(_write, name, name))


def _write(launch: str, written: str, broken: BrokenGraph) -> None:
    broken.behind(broken[launch], torch.ops.aten.mul_.Scalar, broken[written], 2)
