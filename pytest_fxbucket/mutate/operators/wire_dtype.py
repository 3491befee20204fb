"""What is sent is cast to another floating dtype before the launch, and back behind the wait."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.mutate.launches import flights
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site

aten = torch.ops.aten
_OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.float32}


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch of one tensor of floating point numbers."""
    for flight in flights(seen):
        other = None if flight.sent is None else _OTHER.get(flight.sent.meta["val"].dtype)
        if other is not None:
            waits = tuple(wait.name for wait in flight.waits)
            how = f"carries {dtype_name(other)}"
            yield Site(flight.launch.name, how, partial(_cast, flight.launch.name, waits, other))


def _cast(name: str, waits: tuple[str, ...], dtype: torch.dtype, broken: BrokenGraph) -> None:
    launch = broken[name]
    sent = launch.all_input_nodes[0]
    was = sent.meta["val"].dtype
    cast = broken.before(launch, aten._to_copy.default, sent, dtype=dtype)
    launch.replace_input_with(sent, cast)
    # Launch and waits stay, and nothing computes their fake values anew.
    for node in (launch, *map(broken.__getitem__, waits)):
        node.meta["val"] = node.meta["val"].to(dtype)
    for wait in map(broken.__getitem__, waits):
        # Taken before the cast back is made, which reads the wait itself.
        readers = list(wait.users)
        back = broken.behind(wait, aten._to_copy.default, wait, dtype=was)
        for reader in readers:
            reader.replace_input_with(wait, back)
