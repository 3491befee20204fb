"""What arrives and is cast later is cast before the launch instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.collectives import waits_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.mutate.launches import plain_launches, sent_otherwise
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import dtype_of_cast, tensor

if TYPE_CHECKING:
    from torch import fx


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch of which all that arrives is cast to one dtype."""
    for launch, _ in plain_launches(seen):
        dtypes = {_cast_of(user) for wait in waits_of(launch) for user in _ends(wait)}
        # A reader that does not cast puts None into the set.
        if len(dtypes) == 1 and (dtype := dtypes.pop()) is not None:
            yield Site(launch.name, f"sends what was cast to {dtype} already", partial(_cast_early, launch.name, dtype))


def _ends(wait: fx.Node) -> Iterator[fx.Node]:
    """What reads ``wait``, through what moves its elements only."""
    moved = reached([wait], lambda node: (user for user in node.users if _cast_of(user) is None and moves_data(user)))
    for node in moved:
        yield from (user for user in node.users if user not in moved)


def _cast_of(node: fx.Node) -> torch.dtype | None:
    return dtype_of_cast(node) if node.op == "call_function" else None


def _cast_early(name: str, dtype: torch.dtype, broken: BrokenGraph) -> None:
    launch = broken[name]
    sent = launch.all_input_nodes[0]
    value = tensor(sent)
    own = value.dtype if value is not None else None
    cast = torch.ops.aten._to_copy.default
    early = broken.before(launch, cast, sent, dtype=dtype)
    # Cast back behind the wait, since the old casts still read it.
    sent_otherwise(launch, early, lambda wait: broken.behind(wait, cast, wait, dtype=own), broken)
