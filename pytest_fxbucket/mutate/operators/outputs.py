"""What is returned, handed on or written in place is another value."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.graph.storages import base
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import (
    expressions,
    give,
    give_nodes,
    inputs,
    interchangeable,
    read_instead,
    renewed,
    results,
    returned_for_each_other,
    scale,
    stale,
    swapped,
    tensor,
    writes,
)


def buffer_not_written(seen: SeenGraph) -> Iterator[Site]:
    """What is written into a buffer or a parameter is left out, or the buffer that is returned is the one that was given.

    Every write whose result, if it has one, is what it wrote; every buffer that is returned anew.
    """
    for writer, target in writes(seen):
        yield Site(
            writer.name, f"is left out, which writes {base(target).name}", partial(read_instead, writer.name, target.name)
        )
    yield from stale(seen, "buffer", "held")


def carried_stale(seen: SeenGraph) -> Iterator[Site]:
    """What is handed to the next iteration is what was handed to this one.

    Every value that is carried in and out under one name.
    """
    for (place, node, value), old in renewed(seen, "carried"):
        if interchangeable(old, node):
            yield Site(
                node.name, f"is not handed on as {value.fqn}, but {old.name}, which came", partial(give, {place: old.name})
            )


def carried_swapped(seen: SeenGraph) -> Iterator[Site]:
    """Two values of equal shape that an iteration hands to the next change places.

    Each that is handed on, and each that came, with the next one like it.
    """
    yield from swapped(seen, "carried")


def crossing_stale(seen: SeenGraph) -> Iterator[Site]:
    """What goes to another graph is what came from one, or was given, of equal shape.

    Every output that crosses, if an input that crosses is like it.
    """
    came = list(inputs(seen, "crossing").values())
    for place, node, value in results(seen, "crossing"):
        old = next((one for one in came if one is not node and interchangeable(one, node)), None)
        if old is not None:
            yield Site(node.name, f"is not sent as {value.fqn}, but {old.name}, which came", partial(give, {place: old.name}))


def crossing_swapped(seen: SeenGraph) -> Iterator[Site]:
    """Two values of equal shape that go to another graph, or come from one, change places.

    Each output, and each input, that crosses, with the next one like it.
    """
    yield from swapped(seen, "crossing")


def crossing_zeroed(seen: SeenGraph) -> Iterator[Site]:
    """What goes to another graph is zero.

    Every output that crosses.
    """
    for place, node, value in results(seen, "crossing"):
        if tensor(node) is not None:
            yield Site(node.name, f"is zero where it is sent as {value.fqn}", partial(_zero, place, node.name))


def _zero(place: int, name: str, broken: BrokenGraph) -> None:
    zero = broken.before(broken.graph.output_node(), torch.ops.aten.zeros_like.default, broken[name])
    give_nodes({place: zero}, broken)


def gradient_scaled(seen: SeenGraph) -> Iterator[Site]:
    """A gradient is twice as large.

    Every returned gradient, reduced or not yet.
    """
    for _, node, value in results(seen, "grad", "unreduced"):
        yield Site(node.name, f"is doubled, the gradient of {value.fqn}", partial(scale, node.name, 2.0))


def gradient_swapped(seen: SeenGraph) -> Iterator[Site]:
    """Two returned gradients of equal shape change places.

    Each gradient, reduced or not yet, with the next one like it.
    """
    yield from returned_for_each_other(seen, "grad", "unreduced")


def inplace_made_copy(seen: SeenGraph) -> Iterator[Site]:
    """What is written in place goes into a copy.

    Every write.
    """
    for writer, target in writes(seen):
        how = f"writes a copy instead of {base(target).name}"
        yield Site(writer.name, how, partial(_copy, writer.name, target.name))


def _copy(writer: str, target: str, broken: BrokenGraph) -> None:
    copied = broken.before(broken[writer], torch.ops.aten.clone.default, broken[target])
    broken[writer].replace_input_with(broken[target], copied)


def output_stale(seen: SeenGraph) -> Iterator[Site]:
    """A loss, a gradient or a gathered parameter that is returned is another value of the same shape, made earlier.

    Every such output that has something like it before it.
    """
    number = expressions(seen.graph)
    nodes = list(seen.graph.nodes)
    for place, node, value in results(seen, "loss", "grad", "whole", "unreduced"):
        own = {number[node]}
        maker = node
        while len(maker.all_input_nodes) == 1:  # what it was moved out of may be the same
            maker = maker.all_input_nodes[0]
            own.add(number[maker])
        earlier = reversed(nodes[: seen.place[node]])
        instead = next((one for one in earlier if interchangeable(one, node) and number[one] not in own), None)
        if instead is not None:
            how = f"is not returned as {value.role} {value.fqn}".rstrip() + f", but {instead.name}"
            yield Site(node.name, how, partial(give, {place: instead.name}))


def state_not_updated(seen: SeenGraph) -> Iterator[Site]:
    """A state, of an optimizer or a transformation, stays what it was.

    Every state that is returned anew.
    """
    yield from stale(seen, "state")


def state_swapped(seen: SeenGraph) -> Iterator[Site]:
    """Two states of equal shape are returned for each other.

    Each state with the next one like it, as a mean with that of squares.
    """
    yield from returned_for_each_other(seen, "state")


carried_stale.form = carried_swapped.form = "final"  # type: ignore[attr-defined]  # functions have any
