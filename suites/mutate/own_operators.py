"""Operators of a user, for a small model: what they break is known."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import results

aten = torch.ops.aten


def doubled_loss(seen: SeenGraph) -> Iterator[Site]:
    """The loss is twice what it was.

    Of the first graph that gives one.
    """
    for loss in results(seen, "loss"):
        yield Site(loss.node.name, "is doubled", partial(_double, loss.node.name))


def _double(name: str, broken: BrokenGraph) -> None:
    output = broken.graph.output_node()
    doubled = broken.before(output, aten.mul.Tensor, broken[name], 2.0)
    output.replace_input_with(broken[name], doubled)


def traded_sides(seen: SeenGraph) -> Iterator[Site]:
    """What is multiplied trades sides, which changes nothing."""
    for node in seen.graph.nodes:
        if node.target is aten.mul.Tensor and len(node.all_input_nodes) == 2:
            yield Site(node.name, "trades its sides", partial(_trade, node.name))


def _trade(name: str, broken: BrokenGraph) -> None:
    broken[name].args = broken[name].args[::-1]


def cannot(seen: SeenGraph) -> Iterator[Site]:
    """Nothing that can be done."""
    yield Site(next(node.name for node in seen.graph.nodes if is_wait(node)), "is called", partial(_cannot))


def _cannot(broken: BrokenGraph) -> None:
    raise ValueError("not here")


def by_rank(seen: SeenGraph) -> Iterator[Site]:
    """Each rank is broken otherwise, as it cannot be."""
    yield Site(next(node.name for node in seen.graph.nodes if is_wait(node)), "is scaled by the rank", _scale)


def _scale(broken: BrokenGraph) -> None:
    output = broken.graph.output_node()
    made = output.all_input_nodes[0]
    rank: int = broken.rank  # type: ignore[attr-defined]  # A broken graph is of every rank: this is the error to be told.
    output.replace_input_with(made, broken.before(output, aten.mul.Tensor, made, rank))


def nowhere(seen: SeenGraph) -> Iterator[Site]:
    """Has no place anywhere."""
    return iter(())


def raises(seen: SeenGraph) -> Iterator[Site]:
    """Raises instead of looking."""
    raise ValueError("mine")


def no_site(seen: SeenGraph) -> Iterator[str]:
    """Gives names."""
    yield "add"


def breaks_off(seen: SeenGraph) -> Iterator[Site]:
    """Somebody presses Ctrl-C at the second place."""
    waits = [node.name for node in seen.graph.nodes if is_wait(node)]
    for number, name in enumerate(waits[:3]):
        yield Site(name, "is left out", partial(_drop, name, number))


def _drop(name: str, number: int, broken: BrokenGraph) -> None:
    if number == 1:
        raise KeyboardInterrupt
    broken.bypass(broken[name], broken[name].all_input_nodes[0])
