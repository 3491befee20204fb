"""Padded rows of an uneven shard are read as if they were a parameter's, or hold ones where they are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pytest_fxbucket.graph.movement import pads
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.mutate.launches import gathers, reductions
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every strip of first rows off what is gathered, and every pad with zeros of what is reduced."""
    for flight in gathers(seen):
        for node in flight.arrived:
            rows = node.all_input_nodes[0].meta["val"].shape[0] if _strips(node) else 0
            kept = node.meta["val"].shape[0] if rows else 0
            if rows > kept:
                yield Site(node.name, f"takes {rows - kept} padded rows in", partial(_from, node.name, rows - kept, rows))
    for flight in reductions(seen):
        for source in dict.fromkeys(source for _, source in flight.sources):
            if pads(source):
                yield Site(source.name, "pads with ones", partial(_with_ones, source.name))


def _strips(node: Any) -> bool:
    # Dimension 0 from 0 to an end, without a step.
    return operator_name(node) == "aten::slice" and tuple(node.args[1:3]) == (0, 0) and len(node.args) == 4


def _from(name: str, begin: int, end: int, broken: BrokenGraph) -> None:
    node = broken[name]
    node.args = (node.args[0], 0, begin, end)


def _with_ones(name: str, broken: BrokenGraph) -> None:
    node = broken[name]
    node.args = (*node.args[:2], 1.0)
