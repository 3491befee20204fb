"""The answer to ``fxbucket explain --why``, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.explain.folded import Row, fold
from pytest_fxbucket.explain.labels import counted
from pytest_fxbucket.explain.text import below, some, wrapped

if TYPE_CHECKING:
    from pytest_fxbucket.explain.why import Place, Why

_MOST = 6


def answered(found: Sequence[Why]) -> Iterator[str]:
    """The lines on some parameters, those of equal layers together."""
    for row in fold([Row(one.fqn, tuple(_lines(one))) for one in found]):
        for line in (row.entry + row.cells[0], *row.cells[1:]):
            text = line.lstrip()
            yield from wrapped(text, " " * (len(line) - len(text)), "  ")


def _lines(one: Why) -> Iterator[str]:
    """What follows the parameter's name, and the lines below; not wrapped yet."""
    yield f": entry {one.entry}" if one.entry else ""
    if one.note:
        yield f"  {one.note}"
    several = len({place.graph for place in one.places}) > 1
    for place in one.places:
        graph = f" in the {place.graph} graph" if several else ""
        yield from _bucket(place, one.fqn, graph) if place.bucket is not None else _left_alone(place, graph)
    yield from _directions(one)


def _directions(one: Why) -> Iterator[str]:
    """Said once of a parameter that is gathered, or reduced, in both directions."""
    both = {(place.kind, place.direction) for place in one.places}
    for place in one.places:
        for reason in place.reasons:
            if reason.reason == "direction" and {(place.kind, "forward"), (place.kind, "backward")} <= both:
                yield f"  {place.kind} in both directions: {reason.why}"
                yield f"    to change that: {reason.change}"
                return


def _left_alone(place: Place, graph: str) -> Iterator[str]:
    yield f"  {place.direction} {place.kind}{graph}: left alone"
    yield from _reasons(place)


def _bucket(place: Place, fqn: str, graph: str) -> Iterator[str]:
    at = ""
    if place.first_byte is not None and place.bytes is not None:
        at = f", bytes {place.first_byte:,} to {place.first_byte + place.bytes:,} of {place.of_bytes or 0:,} on a rank"
    yield f"  {place.direction} {place.kind}{graph}: bucket {place.bucket}{at}"
    label = place.bucket or ""
    others = [member for member in place.members if member != fqn]
    every = "" if place.apart else "all others of its entry here: "
    yield f"    with {every}{some(list(below(label, others)), 12)}" if others else "    alone"
    if not place.apart and not others:
        yield "    its entry has no other here"
    for name, members in place.apart[:_MOST]:
        yield f"    not with bucket {name}: {some(list(below(label, members)), _MOST)}"
    if len(place.apart) > _MOST:
        yield f"    nor with {counted(len(place.apart) - _MOST, 'more bucket')} of its entry"
    yield from _reasons(place)


def _reasons(place: Place) -> Iterator[str]:
    for reason in place.reasons:
        if reason.reason != "direction":
            yield f"    because {reason.why}"
            yield f"      to change that: {reason.change}"
