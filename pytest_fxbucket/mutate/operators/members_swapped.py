"""Two members of as many elements trade places: in the pack of a launch, behind its wait, or in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations

from pytest_fxbucket.mutate.launches import flights, members_of, pack_of, pieces_of, sizes_of, split_of
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Each size that several members of a launch have: the first two of it."""
    for flight in flights(seen):
        pack, split = pack_of(flight.launch), split_of(flight)
        packed = _first_twins([str(list(one.meta["val"].shape)) for one in members_of(pack)]) if pack is not None else []
        cut = (
            [pair for pair in _first_twins(sizes_of(split)) if set(pair) <= set(pieces_of(split))] if split is not None else []
        )
        if pack is not None:
            for a, b in packed:
                how = f"has its members {a} and {b} in each other's places"
                yield Site(flight.launch.name, how, partial(_swap, pack.name, "", a, b))
        if split is not None:
            for a, b in cut:
                how = f"has what arrives of members {a} and {b} in each other's places"
                yield Site(flight.launch.name, how, partial(_swap, "", split.name, a, b))
        if pack is not None and split is not None and len(members_of(pack)) == len(sizes_of(split)):
            for a, b in (pair for pair in packed if pair in cut):
                how = f"has members {a} and {b} in each other's places, before it and behind"
                yield Site(flight.launch.name, how, partial(_swap, pack.name, split.name, a, b))


def _first_twins(what: Sequence[object]) -> list[tuple[int, int]]:
    """The first two of each that is there several times."""
    # Backwards, so that of each value the first pair is the one that stays in the dict.
    pairs = {what[a]: (a, b) for a, b in reversed(list(combinations(range(len(what)), 2))) if what[a] == what[b]}
    return sorted(pairs.values())


def _swap(pack: str, split: str, a: int, b: int, broken: BrokenGraph) -> None:
    if pack:
        members = members_of(broken[pack])
        members[a], members[b] = members[b], members[a]
        broken[pack].update_arg(0, members)
    if split:
        pieces = pieces_of(broken[split])
        pieces[a].update_arg(1, b)
        pieces[b].update_arg(1, a)
