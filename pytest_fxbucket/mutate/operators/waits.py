"""Waits left out, doubled or moved, and what keeps nodes behind others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.compat.fx import after
from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.mutate.launches import reductions
from pytest_fxbucket.mutate.moving import earlier, later, make_moves
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import leave_out


def order_dependency_lost(seen: SeenGraph) -> Iterator[Site]:
    """What keeps a node behind others, for compilers that know of no order, is taken out.

    Every such node that names others.
    """
    for node in seen.graph.find_nodes(op="call_function", target=after):
        if node.args[1]:
            yield Site(node.name, "is taken out", partial(_take_out, node.name))


def _take_out(name: str, broken: BrokenGraph) -> None:
    node = broken[name]
    # ``after`` gives a list of one tensor, so what reads it are getitems.
    for item in list(node.users):
        broken.bypass(item, node.all_input_nodes[0])
    broken.graph.erase_node(node)


def read_before_wait(seen: SeenGraph) -> Iterator[Site]:
    """One reader of what a wait gives reads the launch itself, before the wait where it can.

    Every wait that is read: its first reader.
    """
    for node in seen.graph.nodes:
        readers = [user for user in node.users if user.op != "output"] if is_wait(node) else []
        if readers:
            first = min(readers, key=seen.place.__getitem__)
            early = all(seen.place[other] < seen.place[node] for other in first.all_input_nodes if other is not node)
            where = "before it is done" if early else "without it"
            yield Site(
                node.name, f"is not waited for by {first.name}, {where}", partial(_read_launch, node.name, first.name, early)
            )


def _read_launch(name: str, reader: str, early: bool, broken: BrokenGraph) -> None:
    wait = broken[name]
    broken[reader].replace_input_with(wait, wait.all_input_nodes[0])
    if early:
        wait.prepend(broken[reader])


def wait_advanced(seen: SeenGraph) -> Iterator[Site]:
    """A wait stands right behind its launch; the reductions of gradients are deferral_lost's.

    Every wait behind whose launch others compute first, but for those of reductions of gradients.
    """
    others = {wait for flight in reductions(seen) for wait in flight.waits}
    for node in seen.graph.nodes:
        if is_wait(node) and node not in others and (move := earlier(seen, node)) is not None:
            yield Site(node.name, "waits right behind its launch", partial(make_moves, (move,)))


def wait_delayed(seen: SeenGraph) -> Iterator[Site]:
    """A wait, with what carries what it gives, stands right before who first computes with that.

    Every wait behind which others compute first.
    """
    for node in seen.graph.nodes:
        if is_wait(node) and (move := later(seen, node)) is not None:
            yield Site(node.name, f"waits right before {move.before}", partial(make_moves, (move,)))


def wait_doubled(seen: SeenGraph) -> Iterator[Site]:
    """A launch is waited for a second time, by its last reader.

    Every wait that is read.
    """
    for node in seen.graph.nodes:
        if is_wait(node) and node.users:
            last = max(node.users, key=seen.place.__getitem__)
            yield Site(node.name, f"is done again right before {last.name}", partial(_wait_again, node.name, last.name))


def _wait_again(name: str, reader: str, broken: BrokenGraph) -> None:
    wait = broken[name]
    again = broken.again(broken[reader].prev, wait)
    broken[reader].replace_input_with(wait, again)


def wait_dropped(seen: SeenGraph) -> Iterator[Site]:
    """A wait is left out, and what it waits for is read at once.

    Every wait.
    """
    for node in seen.graph.nodes:
        if is_wait(node):
            yield Site(node.name, "is left out", partial(leave_out, node.name))
