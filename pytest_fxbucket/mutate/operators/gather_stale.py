"""A gather sends what a parameter was when the graph began, though it was updated before."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.graph.collectives import is_all_gather
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.storages import base
from pytest_fxbucket.mutate.launches import flights, same_shape_and_dtype
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every gather of a parameter that is written in place before."""
    order = order_of(seen.graph)
    for flight in flights(seen):
        for node, source in flight.sources if is_all_gather(flight.launch) else ():
            begun = base(source)
            updated = any(writer < seen.place[flight.launch] for writer in order.writing(begun))
            if begun.op == "placeholder" and updated and same_shape_and_dtype(begun, source):
                how = f"sends what {begun.name} was when the graph began"
                yield Site(flight.launch.name, how, partial(_send_old, node.name, source.name, begun.name))


def _send_old(reader: str, source: str, begun: str, broken: BrokenGraph) -> None:
    first = next(node for node in broken.graph.nodes if node.op not in ("placeholder", "get_attr"))
    old = broken.before(first, torch.ops.aten.clone.default, broken[begun])
    broken[reader].replace_input_with(broken[source], old)
