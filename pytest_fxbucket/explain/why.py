"""Why a parameter is in the bucket that it is in, and not with the others of its entry: as data, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pytest_fxbucket.explain.text import TextRow, below, fold, some_folded, wrapped
from pytest_fxbucket.passes.report import remedy, sentence
from pytest_fxbucket.plan.selectors import new_entry
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.explain.report import ExplainedParameter, Explanation, GraphReport
    from pytest_fxbucket.passes.report import BucketReport


@dataclass(frozen=True, slots=True)
class Reason:
    """Why, and what would have to be changed."""

    reason: str
    """One of the report's reasons for a split; ``left_alone`` of a launch that was left alone."""
    why: str
    change: str


@dataclass(frozen=True, slots=True)
class OtherBucket:
    """Another bucket of the parameter's entry, of the same direction and kind."""

    bucket: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """One launch that carries the parameter, or its gradient."""

    graph: str
    direction: str
    kind: str
    bucket: str | None
    """Label of its bucket; None if it was left alone."""
    launch: str | None
    first_byte: int | None
    """Where the parameter begins in a rank's part of the launch; None if that is not known."""
    bytes: int | None
    """Of the parameter in a rank's part of the launch."""
    of_bytes: int | None
    """Of all members in a rank's part of the launch."""
    members: tuple[str, ...]
    """Of the bucket, in byte order."""
    apart: tuple[OtherBucket, ...]
    reasons: tuple[Reason, ...]
    """What parted this bucket from those of ``apart``; of a launch that was left alone, why it was."""
    simulated: str | None = None
    """How much of it is exposed on the plan's cluster, and why; None without one."""


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """All there is to say of one parameter, as JSON has it."""

    parameter: str
    entry: str | None
    """None if no entry names it, or if buckets are made by size."""
    note: str
    """What is to be said besides; often nothing."""
    places: tuple[BucketPlace, ...]


def why(found: Explanation, parameter: ExplainedParameter) -> ParameterFacts:
    """Where ``parameter`` went in each graph, direction and kind, and why."""
    fqn = parameter.fqn
    places = tuple(place for graph in found.graphs for place in _bucket_places(found, graph, fqn))
    buckets = (bucket for graph in found.graphs for bucket in graph.report.buckets if fqn in bucket.members)
    entry = found.entry_of.get(fqn) or next((bucket.entry for bucket in buckets), "") or None
    return ParameterFacts(fqn, entry, _note(parameter, places), places)


def _bucket_places(found: Explanation, graph: GraphReport, fqn: str) -> Iterator[BucketPlace]:
    for bucket in graph.report.buckets:
        if fqn in bucket.members:
            yield _in_bucket(found, graph, bucket, fqn)
    for left in graph.report.left_alone:
        # A launch that was merged but not moved is listed without a kind: it is among the buckets.
        if left.kind and fqn in left.fqns:
            reason = Reason("left_alone", left.reason, _change(found, fqn))
            yield BucketPlace(graph.phase, left.direction, left.kind, None, None, None, None, None, left.fqns, (), (reason,))


def _in_bucket(found: Explanation, graph: GraphReport, bucket: BucketReport, fqn: str) -> BucketPlace:
    family = (bucket.entry, bucket.direction, bucket.kind)
    others = tuple(
        OtherBucket(graph.labels[other.launch], other.members)
        for other in graph.report.buckets
        if other is not bucket and (other.entry, other.direction, other.kind) == family
    )
    read = graph.members.get(bucket.launch, ())
    # A graph without roles names no members, but has them in the same order.
    member = read[bucket.members.index(fqn)] if len(read) == len(bucket.members) else None
    # Without others of its entry nothing parted the bucket, so that no reason is lacking.
    known = found.by_report or not others
    flight = graph.simulated.get(bucket.launch)
    unknown = Reason("unknown", f"pass {found.pass_name} gives no reason", "ask the pass manual: leave out --pass")
    return BucketPlace(
        graph=graph.phase,
        direction=bucket.direction,
        kind=bucket.kind,
        bucket=graph.labels[bucket.launch],
        launch=bucket.launch,
        first_byte=member.offset if member else None,
        bytes=member.bytes if member else None,
        of_bytes=sum(one.bytes for one in read) if member else None,
        members=bucket.members,
        apart=others,
        simulated=f"on {found.simulation.cluster}: {flight.exposed_clause}"
        if found.simulation is not None and flight
        else None,
        reasons=tuple(
            Reason(split.reason, sentence(split, bucket.kind, graph.dims), remedy(split, bucket.kind))
            for split in bucket.splits
        )
        if known
        else (unknown,),
    )


def _change(found: Explanation, fqn: str) -> str:
    # By size, and of a graph without roles, there are no entries, so that none can be missing.
    if fqn in found.entry_of or not found.entry_of:
        return "nothing in the plan can change that: it follows from the graph"
    entries = list(dict.fromkeys(found.entry_of.values()))
    holder = new_entry(fqn, entries)
    near = get_close_matches(holder, entries, n=2, cutoff=0.4) or entries[:2]
    return f'add an entry such as "{holder}", or set bucket.unplanned = "root"; nearest entries: {", ".join(near)}'


def _note(parameter: ExplainedParameter, places: tuple[BucketPlace, ...]) -> str:
    if parameter.role != "param":
        return f"it is a {parameter.role}, no parameter: every rank has all of it, so nothing gathers or reduces it"
    kinds = {place.kind for place in places}
    if not kinds:
        return "no launch carries it: the step never reads it, or what reads it could not be followed"
    if kinds == {"all_gather"}:
        frozen = "" if parameter.trainable else ": it is frozen"
        return f"no gradient of it is reduced{frozen}"
    return ""


_MOST = 6


def answered(answers: Sequence[ParameterFacts]) -> Iterator[str]:
    """The lines on some parameters, those of equal layers together."""
    for row in fold([TextRow(one.parameter, tuple(_lines(one))) for one in answers]):
        for line in (row.entry + row.cells[0], *row.cells[1:]):
            text = line.lstrip()
            yield from wrapped(text, " " * (len(line) - len(text)), "  ")


def _lines(one: ParameterFacts) -> Iterator[str]:
    """What follows the parameter's name, and the lines below; not wrapped yet."""
    yield f": entry {one.entry}" if one.entry else ""
    if one.note:
        yield f"  {one.note}"
    several = len({place.graph for place in one.places}) > 1
    for place in one.places:
        graph = f" in the {place.graph} graph" if several else ""
        yield f"  {place.direction} {place.kind}{graph}: {_where(place)}"
        if place.simulated is not None:
            yield f"    simulated {place.simulated}"
        yield from _neighbours(place, one.parameter)
        for reason in place.reasons:
            # ``_directions`` says that one, once for both.
            if reason.reason != "direction":
                yield f"    because {reason.why}"
                yield f"      to change that: {reason.change}"
    yield from _directions(one)


def _directions(one: ParameterFacts) -> Iterator[str]:
    """Said once of a parameter that is gathered, or reduced, in both directions."""
    both = {(place.kind, place.direction) for place in one.places}
    for place in one.places:
        for reason in place.reasons:
            if reason.reason == "direction" and {(place.kind, "forward"), (place.kind, "backward")} <= both:
                yield f"  {place.kind} in both directions: {reason.why}"
                yield f"    to change that: {reason.change}"
                return


def _where(place: BucketPlace) -> str:
    if place.bucket is None:
        return "left alone"
    if place.first_byte is None or place.bytes is None:
        return f"bucket {place.bucket}"
    end = place.first_byte + place.bytes
    return f"bucket {place.bucket}, bytes {place.first_byte:,} to {end:,} of {place.of_bytes or 0:,} on a rank"


def _neighbours(place: BucketPlace, fqn: str) -> Iterator[str]:
    """Which parameters are in the same bucket, and which of the same entry are in others."""
    if place.bucket is None:
        return
    label = place.bucket
    others = [member for member in place.members if member != fqn]
    every = "" if place.apart else "all others of its entry here: "
    yield f"    with {every}{some_folded(list(below(label, others)), 12)}" if others else "    alone"
    if not place.apart and not others:
        yield "    its entry has no other here"
    for other in place.apart[:_MOST]:
        yield f"    not with bucket {other.bucket}: {some_folded(list(below(label, other.members)), _MOST)}"
    if len(place.apart) > _MOST:
        yield f"    nor with {counted(len(place.apart) - _MOST, 'more bucket')} of its entry"
