"""Does what moved into the next call hide behind its forward? Launched first, waited for right before somebody needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.phased import Phased, is_moved

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Reading


def hidden_by_nothing(entry_of: Mapping[str, str], steady: Phased) -> list[str]:
    """Entries that are needed before anything of the forward computes: they move, and nothing hides that."""
    computes = _forward(steady.reading)
    return [
        entry
        for entry in dict.fromkeys(entry_of.values())
        if not computes or _needed(entry_of, entry, steady.reading) <= computes[0][0]
    ]


def hiding_problems(entry_of: Mapping[str, str], steady: Phased) -> Iterator[str]:
    """Launched before the forward computes, waited for right before the result is needed, and needed by who reads it."""
    reading, computes = steady.reading, _forward(steady.reading)
    joined = _joined(entry_of, steady)
    for entry in dict.fromkeys(entry_of.values()):
        own = [b for b in reading.buckets if is_moved(entry_of, b) and entry in {entry_of.get(fqn) for fqn in b.fqns}]
        needed = min(_needed(entry_of, other, reading) for other in joined[entry])
        last = max((bucket.level for bucket in own), default=0)
        for bucket in own:
            before = [fqn for place, fqn in computes if place < min(bucket.launch, needed)]
            if bucket.level == 0 and before:
                yield f"the {bucket.kind} of {entry} is launched behind the compute of {before[0]}, which could hide it"
            behind = [fqn for place, fqn in computes if bucket.wait is not None and bucket.wait < place < needed]
            if bucket.level == last and behind:
                yield f"the {bucket.kind} of {entry} is waited for before the compute of {behind[-1]}, which could hide it"
        yield from _stale(entry_of, entry, steady)


def _joined(entry_of: Mapping[str, str], steady: Phased) -> dict[str, set[str]]:
    """By entry those, itself among them, with which it has nodes of the update in common: it must be there for all of them."""
    joined = {entry: {entry} for entry in entry_of.values()}
    made_of: dict[fx.Node, set[str]] = {}
    for bucket in steady.reading.buckets:
        for wait in bucket.waits if is_moved(entry_of, bucket) else ():
            made_of[steady.nodes[wait]] = {entry_of[fqn] for fqn in bucket.fqns if fqn in entry_of}
    for place in sorted(steady.reading.late):
        node = steady.nodes[place]
        own = made_of.setdefault(node, set()).union(*(made_of.get(source, ()) for source in node.all_input_nodes))
        made_of[node] = own
        for entry in own:
            joined[entry] |= own
    return joined


def _stale(entry_of: Mapping[str, str], entry: str, steady: Phased) -> Iterator[str]:
    """Whoever reads a parameter of ``entry`` reads the new one."""
    reading = steady.reading
    made = {fqn: node for (role, fqn), node in steady.results.items() if role == "param" and entry_of.get(fqn) == entry}
    new = set(made.values())
    old = {node: value.fqn for node, value in steady.given.items() if value.role == "param" and value.fqn in made}
    late = {steady.nodes[place] for place in reading.late} | {steady.nodes[place] for place in reading.updating}
    for node, fqn in old.items():
        reader = next((user for user in node.users if user not in late and user.op != "output"), None)
        if reader is not None and node not in new:
            yield f"{reader.name} reads {fqn} as the call before found it, not as it left it"


def _needed(entry_of: Mapping[str, str], entry: str, reading: Reading) -> int:
    """Where the first of ``entry``'s parameters is gathered, or read if it needs no gather."""
    gathers = (
        bucket.launch
        for bucket in reading.buckets
        if bucket.kind == "all_gather" and any(entry_of.get(fqn) == entry for fqn in bucket.fqns)
    )
    reads = (place for place, fqn in _forward(reading) if entry_of.get(fqn) == entry)
    return min((*gathers, *reads), default=reading.last)


def _forward(reading: Reading) -> list[tuple[int, str]]:
    """Forward compute, in order."""
    return [(place, fqn) for place, direction, fqn in reading.computes if direction == "forward" and place not in reading.late]
