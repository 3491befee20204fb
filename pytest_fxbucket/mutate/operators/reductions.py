"""Reductions, of gradients and norms, left out or done otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import fx

from pytest_fxbucket.graph.collectives import REDUCTIONS, argument, is_wait, launch_kind, waits_of
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.mutate.arithmetic import is_norm, other_sums
from pytest_fxbucket.mutate.launches import LaunchInFlight, flights, left_out, plain_launches, reductions
from pytest_fxbucket.mutate.moving import earlier, make_moves
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import leave_out, put_behind, results, scale, tensor
from pytest_fxbucket.passes.new_nodes import set_argument

_OTHERS = {"avg": ("sum", "max"), "sum": ("avg", "max")}


def clip_unreduced(seen: SeenGraph) -> Iterator[Site]:
    """Gradients are clipped by a wrong norm: by that of this rank alone, or with one gradient's norm in place of another's.

    Sums of norms over ranks, and the stacks of norms that go into them.
    """
    for launch, of_norms in other_sums(seen):
        if of_norms:
            yield Site(launch.name, "is left out: the norm is that of this rank", left_out(launch, waits_of(launch)))
    for stack in seen.graph.nodes:
        if operator_name(stack) != "aten::stack" or not all(map(is_norm, stack.all_input_nodes)):
            continue
        for first, second in pairwise(stack.all_input_nodes):
            change = partial(_twice, stack.name, first.name, second.name)
            yield Site(stack.name, f"has the norm {first.name} for {second.name} too", change)


def _twice(stack: str, first: str, second: str, broken: BrokenGraph) -> None:
    broken[stack].replace_input_with(broken[second], broken[first])


def deferral_lost(seen: SeenGraph) -> Iterator[Site]:
    """A reduction of gradients is waited for right behind its launch.

    Every reduction of gradients behind whose launch others compute before the wait.
    """
    for flight in reductions(seen):
        moves = tuple(move for wait in flight.waits if (move := earlier(seen, wait)) is not None)
        if moves:
            yield Site(flight.launch.name, "is waited for right behind its launch", partial(make_moves, moves))


def divisor_changed(seen: SeenGraph) -> Iterator[Site]:
    """A factor right before or behind a reduction is left out, or done twice; where there is none, what it brings is halved.

    Every reduction of gradients, for each factor right before and behind it.
    """
    for flight in reductions(seen):
        factors = sorted(_factors(flight), key=seen.place.__getitem__)
        for node in factors:
            yield Site(node.name, "is left out", partial(leave_out, node.name))
            yield Site(node.name, "is done twice", partial(_repeat, node.name))
        if not factors:
            for wait in flight.waits:
                yield Site(wait.name, "gives half of what arrived", partial(scale, wait.name, 0.5))


def _factors(flight: LaunchInFlight) -> set[fx.Node]:
    """Products with a number that are sent, or that read what arrived, through what only carries it."""
    read = {user for node in flight.arrived for user in node.users}
    return {node for node in read.union(source for _, source in flight.sources) if _is_factor(node)}


def _is_factor(node: fx.Node) -> bool:
    named = operator_name(node) in ("aten::mul", "aten::div") and len(node.args) == 2
    return named and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], (int, float))


def _repeat(name: str, broken: BrokenGraph) -> None:
    node = broken[name]
    put_behind(node, broken.again(node, node, node, node.args[1]))


def gradient_unreduced(seen: SeenGraph) -> Iterator[Site]:
    """A gradient is what one rank alone made: what was sent to be reduced, not what came back.

    Every returned gradient of which all steps back to its reduction have one input each.
    """
    sent_by = {launch: sent for launch, sent in plain_launches(seen) if launch_kind(launch) in REDUCTIONS}
    for _, node, value in results(seen, "grad"):
        *unpacked, wait = _back_to_wait(node)
        if is_wait(wait) and (sent := sent_by.get(wait.all_input_nodes[0])) is not None:
            change = partial(_unreduced, [one.name for one in reversed(unpacked)], wait.name, sent.name)
            yield Site(node.name, f"is not what was reduced, but what was sent, for {value.fqn}", change)


def _back_to_wait(node: fx.Node) -> list[fx.Node]:
    steps = [node]
    while not is_wait(steps[-1]) and len(steps[-1].all_input_nodes) == 1:
        steps.append(steps[-1].all_input_nodes[0])
    return steps


def _unreduced(unpacked: list[str], wait: str, sent: str, broken: BrokenGraph) -> None:
    last = broken[unpacked[-1] if unpacked else wait]
    arrived, own = tensor(broken[wait]), broken[sent]
    assert arrived is not None
    place = last.next
    # A reduce-scatter brings a part of what is sent; here it is the first rows, as on the first rank.
    if (whole := tensor(own)) is not None and whole.shape != arrived.shape:
        own = broken.before(place, torch.ops.aten.slice.Tensor, own, 0, 0, arrived.shape[0])
    made = {broken[wait]: own}
    readers = list(last.users)
    # The unpack is copied and not changed: other gradients of the bucket are cut out of the same nodes.
    with broken.graph.inserting_before(place):
        for name in unpacked:
            made[broken[name]] = broken.graph.node_copy(broken[name], lambda node: made[node])
    for reader in readers:
        reader.replace_input_with(last, made[last])


def op_other(seen: SeenGraph) -> Iterator[Site]:
    """A reduction sums where it should average, or the other way round, or takes the largest.

    Every sum and every average, each of the other two.
    """
    for flight in flights(seen):
        op = str(argument(flight.launch, "reduce_op"))
        for other in _OTHERS.get(op, ()):
            yield Site(flight.launch.name, f"reduces by {other}, not by {op}", partial(_reduce_by, flight.launch.name, other))


def _reduce_by(name: str, op: str, broken: BrokenGraph) -> None:
    set_argument(broken[name], "reduce_op", op)


def partial_not_reduced(seen: SeenGraph) -> Iterator[Site]:
    """A sum over ranks of what is no gradient, as tensor parallelism needs it, is left out: each rank goes on with its part.

    Every all-reduce that has no parameter's gradient, but for those of norms.
    """
    for launch, of_norms in other_sums(seen):
        if not of_norms:
            yield Site(launch.name, "is left out", left_out(launch, waits_of(launch)))
