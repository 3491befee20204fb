"""What ``fxbucket explain`` prints for people: at most 120 columns, equal layers in one line.

Rows are of equal layers if they differ in nothing but their layer's number, and in numbers of layers that stand equally far
from it.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_fxbucket.passes.report import sentence
from pytest_fxbucket.words import counted, human_bytes, some

if TYPE_CHECKING:
    from pytest_fxbucket.explain.report import Explanation, GraphReport, Simulation
    from pytest_fxbucket.passes.report import BucketReport
    from pytest_fxbucket.step.roles import Transformed

# A number that is a whole part of a name: the 3 of ``layers.3``, not that of ``w3``.
_NUMBER = re.compile(r"(?<![^.+ ])(\d+)(?![^.+ ])")
# Stands for a number or a range as (first, last), counted from the row's own layer; no name has a NUL in it.
_MARK = re.compile("\0(-?\\d+):(-?\\d+)\0")


@dataclass(frozen=True, slots=True)
class TextRow:
    """What is said of one entry, or of several equal ones."""

    entry: str
    """Whose number is folded."""
    cells: tuple[str, ...]
    """Whatever else is said, FQNs and entries in it written out."""
    count: int = 1


def fold(rows: Sequence[TextRow]) -> list[TextRow]:
    """``rows``, with one row in place of those of equal layers with consecutive numbers, where the first of them was.

    ``layers.3`` becomes ``layers.[3-7]`` in the entry and in the cells. ``layers.2`` beside it becomes ``layers.[2-6]``, if the
    cells of all these rows name the layer before their own.
    """
    # Rows of equal layers get the same key, since it has each layer's number as the distance from the row's own. Sorted,
    # numbers of one run grow by one with their index, so their difference tells the runs apart.
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    singles: list[tuple[int, TextRow]] = []
    for place, row in enumerate(rows):
        found = _stem(row.entry)
        if found is None:
            singles.append((place, row))
        else:
            stem, number = found
            marked = (_marked(text, stem, number) for text in row.cells)
            key = (stem, _marked(row.entry, stem, number, bare=True), *marked)
            alike.setdefault(key, []).append((number, place))
    folded = singles
    for (_, *texts), places in alike.items():
        for _, neighbours in groupby(enumerate(sorted(places)), key=lambda one: one[1][0] - one[0]):
            run = [pair for _, pair in neighbours]
            entry, *cells = (_filled(text, run[0][0], run[-1][0]) for text in texts)
            folded.append((min(place for _, place in run), TextRow(entry, tuple(cells), len(run))))
    return [row for _, row in sorted(folded, key=lambda pair: pair[0])]


def fold_names(names: Sequence[str]) -> list[str]:
    """``names`` with neighbouring layers as one."""
    return [row.entry for row in fold([TextRow(name, ()) for name in names])]


def _stem(entry: str) -> tuple[str, int] | None:
    """What stands before the last number of the first name in ``entry``, and the number; None if it has none."""
    found = list(_NUMBER.finditer(entry.partition("+")[0]))
    return (entry[: found[-1].start()], int(found[-1][1])) if found else None


def _marked(text: str, stem: str, number: int, bare: bool = False) -> str:
    """``text`` with each number behind ``stem``, and each range of them, as the distance from ``number``.

    Where ``stem`` is empty, only a number before a name (``0.weight``) is a layer's, since others count something. With
    ``bare`` every number is.
    """
    pattern = rf"(?<![\w.#]){re.escape(stem)}(?:(\d+)|\[(\d+)-(\d+)\])" + (r"(?!\w)" if stem or bare else r"(?=\.[A-Za-z_])")

    def distance(found: re.Match[str]) -> str:
        low, high = (found[1], found[1]) if found[1] else (found[2], found[3])
        return f"{stem}\0{int(low) - number}:{int(high) - number}\0"

    return re.sub(pattern, distance, text)


def _filled(text: str, first: int, last: int) -> str:
    def numbers(found: re.Match[str]) -> str:
        low, high = first + int(found[1]), last + int(found[2])
        return str(low) if low == high else f"[{low}-{high}]"

    return _MARK.sub(numbers, text)


WIDTH = 120
_ENTRY = 40
_MOST_LEFT = 6


def explained(found: Explanation, name: str) -> Iterator[str]:
    """The lines on the plan ``name``."""
    by = "" if found.by_report else "; it gives no report, so this is read off its graph, which does not say why"
    yield f"{name}: pass {found.pass_name}, {counted(found.plan.world_size, 'rank')}{by}"
    if (how := found.pipelined) is not None:
        yield (
            f"{counted(how.stages, 'stage')} on {counted(len(set(how.pp_places)), 'rank')} of pp by {how.schedule}, "
            f"{counted(how.microbatches, 'microbatch')}; fxbucket stages says what they hold and what crosses"
        )
    for graph in found.graphs:
        yield ""
        if how is not None and not graph.report.launches_before and not graph.report.launches_after and not graph.updates:
            yield f"{graph.phase} graph: no launch"
        else:
            yield from graph_lines(graph)
    for one in found.transformations:
        yield ""
        yield from transformation_lines(one)
    if found.simulation is not None:
        yield ""
        for line in simulation_lines(found.simulation):
            yield from wrapped(line.lstrip(), "  " if line.startswith(" ") else "", "  ")


def wrapped(text: str, indent: str = "", more: str = "") -> Iterator[str]:
    """``text`` in lines of at most 120 columns, all but the first with ``more`` before them as well; names stay whole."""
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + more,
        break_long_words=False,
        break_on_hyphens=False,
    )


def some_folded(names: Sequence[str], most: int = 3) -> str:
    """The first few of ``names``, equal layers as one."""
    return some(fold_names(names), most)


def graph_lines(graph: GraphReport) -> Iterator[str]:
    """The lines on one graph."""
    report = graph.report
    totals = report.totals
    yield f"{graph.phase} graph: {counted(report.launches_before, 'launch')} became {report.launches_after:,}"
    yield (
        f"{counted(totals.buckets, 'bucket')} with {counted(totals.members, 'member')}, {human_bytes(totals.bytes)}; "
        f"{totals.hidden:,} hidden behind compute, {totals.buckets - totals.hidden:,} exposed; "
        f"{counted(report.launches_after - totals.launches_after, 'launch')} left alone"
    )
    for (direction, kind), sums in report.totals_by_kind.items():
        own = [bucket for bucket in report.buckets if (bucket.direction, bucket.kind) == (direction, kind)]
        yield ""
        yield (
            f"{direction} {kind}: {counted(sums.buckets, 'bucket')}, {counted(sums.members, 'member')}, "
            f"{human_bytes(sums.bytes)}, {sums.hidden:,} hidden"
        )
        yield from _table(own, graph)
    if graph.kept:
        yield from wrapped(f"kept gathered until backward: {some_folded(graph.kept)}", "", "  ")
    yield from _members(graph)
    yield from _splits(graph)
    yield from _updates(graph)
    yield from _rest(graph)


def transformation_lines(one: Transformed) -> Iterator[str]:
    """The lines on one transformation: what it did, and what it did not and why."""
    yield f"{one.transformation}: {counted(len(one.done), 'change')}, {counted(len(one.left), 'thing')} left as it was"
    for done in one.done:
        yield from wrapped(done, "  ", "  ")
    for what, why in one.left:
        yield from wrapped(f"left: {what}: {why}", "  ", "  ")


def simulation_lines(found: Simulation) -> Iterator[str]:
    """How long the step takes there, and what of it is exposed."""
    for one in found.ranks:
        line = one.timeline
        of = f", rank {', '.join(map(str, one.ranks))}" if len(found.ranks) > 1 else ""
        yield (
            f"simulated on {found.cluster}{of}: {1000 * line.seconds:.3f} ms, {1000 * line.exposed:.3f} ms exposed, "
            f"{line.hidden} of {counted(len(line.flights), 'launch')} hidden"
        )
        yield from (f"  {flight.name}: {flight.exposed_clause}" for flight in one.flights if not flight.flight.is_hidden)


def _table(buckets: Sequence[BucketReport], graph: GraphReport) -> Iterator[str]:
    head = ("entry", "launches", "members", "bytes", "dtype", "group", "overlaps with")
    rows = [(row.entry, *row.cells) for row in fold([_row(bucket, graph) for bucket in buckets])]
    rows = [(row[0] if len(row[0]) <= _ENTRY else f"{row[0][: _ENTRY - 3]}...", *row[1:]) for row in rows]
    width = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head) - 1)]
    for row in [head, *rows]:
        cells = (
            text.rjust(size) if column in (1, 2, 3) else text.ljust(size)
            for column, (text, size) in enumerate(zip(row[:-1], width, strict=True))
        )
        # The last column is wrapped beside the others, or below them if one of its words is too long for that.
        start = "  " + "  ".join(cells) + "  "
        fits = max(map(len, row[-1].split())) <= WIDTH - len(start)
        lines = list(wrapped(row[-1], " " * len(start) if fits else " " * 6))
        yield from [start + lines[0].lstrip(), *lines[1:]] if fits else [start.rstrip(), *lines]


def _row(bucket: BucketReport, graph: GraphReport) -> TextRow:
    overlap = "nothing: exposed"
    if bucket.overlap_nodes:
        of = f" of {some_folded(bucket.overlaps)}" if bucket.overlaps else ""
        overlap = f"{counted(bucket.overlap_nodes, 'node')}{of}"
    if bucket.updates:
        overlap += f"; {counted(len(bucket.updates), 'update')}: {some_folded(bucket.updates)}"
    cells = (
        f"{bucket.launches_before} -> {bucket.launches_after}",
        str(len(bucket.members)),
        human_bytes(bucket.bytes),
        f"{bucket.dtype} {bucket.op}".strip(),
        graph.dims.get(bucket.group, "unknown group"),
        overlap,
    )
    return TextRow(graph.labels[bucket.launch], cells)


def _members(graph: GraphReport) -> Iterator[str]:
    """Each list of members once, with the kinds that have it."""
    kinds: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for bucket in graph.report.buckets:
        kinds.setdefault((graph.labels[bucket.launch], bucket.members), []).append(f"{bucket.direction} {bucket.kind}")
    # All kinds of a label mostly have one list, and then they are not named.
    lists = Counter(label for label, _ in kinds)
    rows = [
        TextRow(label, (", ".join(below(label, members)), f" ({', '.join(dict.fromkeys(said))})" if lists[label] > 1 else ""))
        for (label, members), said in kinds.items()
    ]
    if rows:
        yield from ("", "members in byte order")
    for row in fold(rows):
        yield from wrapped(f"{row.entry}{row.cells[1]}: {row.cells[0]}", "  ", "  ")


def below(label: str, members: Sequence[str]) -> Iterator[str]:
    """``members`` without the entry that a bucket's ``label`` begins with; all in full if one of them is not below it."""
    stem = label.partition(" #")[0] + "."
    whole = not all(fqn.startswith(stem) for fqn in members)
    return (fqn if whole else "." + fqn.removeprefix(stem) for fqn in members)


def _splits(graph: GraphReport) -> Iterator[str]:
    """Each reason once, with the buckets that it parted."""
    rows = [
        TextRow(graph.labels[bucket.launch], (f"{bucket.direction} {bucket.kind}", sentence(split, bucket.kind, graph.dims)))
        for bucket in graph.report.buckets
        for split in bucket.splits
    ]
    said: dict[str, dict[str, list[str]]] = {}
    for row in fold(rows):
        said.setdefault(row.cells[1], {}).setdefault(row.cells[0], []).append(row.entry)
    if said:
        yield from ("", "why an entry has several buckets")
    for why, places in said.items():
        yield from wrapped(why, "  ", "  ")
        for kind, entries in places.items():
            yield from wrapped(f"{kind} of {', '.join(entries)}", "    ", "  ")


def _updates(graph: GraphReport) -> Iterator[str]:
    """Which reductions the updates of each entry are made of."""
    rows = []
    for one in graph.updates:
        states = f" and {counted(one.states, 'state')}" if one.states else ""
        reductions = some_folded(one.reductions) or "no reduction"
        rows.append(TextRow(one.entry, (f"{counted(len(one.parameters), 'parameter')}{states} of {reductions}",)))
    if rows:
        yield from ("", "updates, and the reductions that they are made of")
    for row in fold(rows):
        yield from wrapped(f"{row.entry}: {row.cells[0]}", "  ", "  ")


def _rest(graph: GraphReport) -> Iterator[str]:
    report = graph.report
    reasons: dict[str, list[str]] = {}
    for left in report.left_alone:
        reasons.setdefault(left.reason, []).append(left.what)
    yield from ("", "left alone" if reasons else "left alone: nothing")
    for reason, what in reasons.items():
        yield from wrapped(f"{some_folded(what, _MOST_LEFT)}: {reason}", "  ", "  ")
    barriers = dict.fromkeys(report.barriers)
    yield f"moved past by nothing: {counted(len(barriers), 'barrier')}" if barriers else "barriers: none"
    for barrier in barriers:
        yield from wrapped(barrier, "  ", "  ")
    if report.schedule is not None:
        found = report.schedule
        yield (
            f"schedule found by itself: {1000 * found.exposed:.3f} ms exposed, {1000 * found.exposed_before:.3f} ms before it; "
            f"{found.hidden} of {counted(found.collectives, 'collective')} hidden; {human_bytes(found.peak)} at the peak, "
            f"{human_bytes(found.peak_before)} before it"
        )
    yield (
        f"other nodes in another order than before: {report.displaced:,} of {report.compared:,}; gathered at once at most "
        f"{human_bytes(report.gathered_after)}, before {human_bytes(report.gathered_before)}"
    )
