"""Launches left out, doubled, moved, or on another process group."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.compat.c10d import twin_name, untwinned
from pytest_fxbucket.mutate.launches import can_drop, flights, gathers, left_out, regroup, trades
from pytest_fxbucket.mutate.moving import earlier, later, make_moves
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def group_other(seen: SeenGraph) -> Iterator[Site]:
    """A collective is launched on another process group of as many ranks.

    Every launch, for each group of the mesh of as many ranks as its own has, others than those.
    """
    groups = seen.mesh.groups(seen.rank)
    for flight in flights(seen):
        own = seen.passed.members.get(flight.group, groups.get(untwinned(flight.group)))
        for name, ranks in groups.items():
            if own is not None and len(ranks) == len(own) and set(ranks) != set(own):
                yield Site(flight.launch.name, f"is launched on {name}", partial(regroup, flight.launch.name, name))


def group_twin(seen: SeenGraph) -> Iterator[Site]:
    """A collective is launched on a process group of its own of the same ranks, or on the one that others share.

    Every launch.
    """
    for flight in flights(seen):
        other = twin_name(flight.group) if flight.group == untwinned(flight.group) else untwinned(flight.group)
        yield Site(flight.launch.name, f"is launched on {other}", partial(regroup, flight.launch.name, other))


def launch_advanced(seen: SeenGraph) -> Iterator[Site]:
    """A launch, with its pack, stands as early as what it sends is there.

    Every launch that could be earlier, past compute or others.
    """
    for flight in flights(seen):
        if (move := earlier(seen, flight.launch)) is not None:
            yield Site(flight.launch.name, f"is launched before {move.before}", partial(make_moves, (move,)))


def launch_delayed(seen: SeenGraph) -> Iterator[Site]:
    """A launch stands right before its wait; the gathers of parameters are prefetch_lost's.

    Every launch behind which others compute before its wait, but for those that gather parameters.
    """
    others = {flight.launch for flight in gathers(seen)}
    for flight in flights(seen):
        if flight.launch not in others and (move := later(seen, flight.launch)) is not None:
            yield Site(flight.launch.name, "is launched right before its wait", partial(make_moves, (move,)))


def launch_doubled(seen: SeenGraph) -> Iterator[Site]:
    """The same is launched a second time, and waited for; nobody reads what it brings.

    Every launch of one tensor that is waited for.
    """
    for flight in flights(seen):
        if flight.sent is not None and flight.waits:
            change = partial(_launch_again, flight.launch.name, flight.waits[0].name)
            yield Site(flight.launch.name, "is launched again, and waited for behind its own wait", change)


def _launch_again(name: str, wait: str, broken: BrokenGraph) -> None:
    launch, first = broken[name], broken[wait]
    again = broken.again(launch, launch)
    broken.again(first, first, again)


def launch_dropped(seen: SeenGraph) -> Iterator[Site]:
    """A collective is left out, and who read what it brings reads what was to be sent.

    Every launch of one tensor for whose result something that is sent can stand in.
    """
    for flight in flights(seen):
        if can_drop(flight):
            yield Site(flight.launch.name, "is left out, and its wait", left_out(flight.launch, flight.waits))


def launches_swapped(seen: SeenGraph) -> Iterator[Site]:
    """Two launches of one process group trade places, on all ranks alike.

    Every two that follow each other in their group, where what they need and who reads them allows it.
    """
    for first, second, move in trades(seen):
        yield Site(first, f"trades places with {second}", partial(make_moves, (move,)))


def order_on_a_rank(seen: SeenGraph) -> Iterator[Site]:
    """Two launches of one process group trade places, on the last rank alone.

    Every two that follow each other in their group, where what they need and who reads them allows it.
    """
    for first, second, move in trades(seen):
        yield Site(first, f"trades places with {second}", partial(make_moves, (move,)), on_last_rank=True)
