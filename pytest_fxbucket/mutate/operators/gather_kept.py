"""A parameter is not gathered again in backward: what forward gathered is kept, and read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import fx

from pytest_fxbucket.mutate.launches import LaunchInFlight, gathers, pieces_of, same_shape_and_dtype, split_of
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every gather of which an earlier one has all members, cut alike."""
    had: dict[str, fx.Node] = {}
    for flight in gathers(seen):
        parts = _parts(flight)
        kept = {fqn: had[fqn] for fqn in parts if fqn in had and same_shape_and_dtype(had[fqn], parts[fqn])}
        if parts and len(kept) == len(parts) and set(flight.launch.users) == set(flight.waits):
            pairs = tuple((node.name, kept[fqn].name) for fqn, node in parts.items())
            how = "is left out, since an earlier one brought the same"
            yield Site(flight.launch.name, how, partial(_keep, pairs))
        # The earliest gather of a parameter counts, for a third one, too.
        had = parts | had


def _parts(flight: LaunchInFlight) -> dict[str, fx.Node]:
    """By FQN what is cut out of what arrives, or all of it; empty where that cannot be told."""
    assert flight.bucket is not None
    fqns, split = flight.bucket.fqns, split_of(flight)
    if split is None:
        return {fqns[0]: flight.waits[0]} if len(fqns) == len(flight.waits) == 1 else {}
    pieces = pieces_of(split)
    return {fqn: pieces[n] for n, fqn in enumerate(fqns)} if sorted(pieces) == list(range(len(fqns))) else {}


def _keep(pairs: tuple[tuple[str, str], ...], broken: BrokenGraph) -> None:
    for name, kept in pairs:
        broken[name].replace_all_uses_with(broken[kept])
    unread = [broken[name] for name, _ in pairs]
    for node in unread:  # grows: what only unread nodes read is unread
        if not node.users and node.op == "call_function":
            unread.extend(source for source in node.all_input_nodes if set(source.users) == {node})
            broken.graph.erase_node(node)
