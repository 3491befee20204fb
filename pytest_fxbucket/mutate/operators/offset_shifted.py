"""A member is cut out of what arrives at a wrong place: one element off, or where its neighbour of another size was before."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise

import torch

from pytest_fxbucket.mutate.launches import dim_of, flights, pieces_of, sizes_of, split_of
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site

aten = torch.ops.aten


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Each piece of each unpack, and each two neighbours of different sizes."""
    for flight in flights(seen):
        if (split := split_of(flight)) is None:
            continue
        sizes, pieces = sizes_of(split), pieces_of(split)
        for number, end in enumerate(accumulate(sizes)):
            if number in pieces and sizes[number]:
                # Nothing lies before the first piece: -1 would count from the end.
                to = -1 if number else 1
                change = partial(_shift, pieces[number].name, split.name, end - sizes[number] + to, end + to)
                yield Site(pieces[number].name, f"begins {to:+} element further", change)
        for a, b in pairwise(sorted(pieces)):
            if b == a + 1 and sizes[a] != sizes[b]:
                how = f"and {pieces[b].name} are cut as if the second came first"
                yield Site(pieces[a].name, how, partial(_exchange, split.name, a))


def _shift(piece: str, split: str, begin: int, end: int, broken: BrokenGraph) -> None:
    node, cut = broken[piece], broken[split]
    broken.bypass(node, broken.before(node, aten.slice.Tensor, cut.args[0], dim_of(cut), begin, end))


def _exchange(name: str, first: int, broken: BrokenGraph) -> None:
    split = broken[name]
    sizes, pieces = sizes_of(split), pieces_of(split)
    sizes[first : first + 2] = reversed(sizes[first : first + 2])
    split.update_arg(1, sizes)
    pieces[first].update_arg(1, first + 1)
    pieces[first + 1].update_arg(1, first)
