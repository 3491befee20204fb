"""Timelines that a browser can draw: fewer ranks, and compute by outer modules, as far as needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_fxbucket.bench.report.evenly import jitter

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.span import Span

MOST_RANKS = 8
MOST_SPANS = 6000
_COPIES = ("copy-in ", "copy-out ")


@dataclass(frozen=True, slots=True)
class Drawn:
    """What of a step is drawn."""

    spans: tuple[Span, ...]
    left_out: tuple[str, ...]
    """What is not, as sentences; empty if all is drawn."""


def drawn(spans: Sequence[Span], most_ranks: int = MOST_RANKS, most_spans: int = MOST_SPANS) -> Drawn:
    """At most so many ranks and spans: modules' names are cut to two, then ranks left out, then the shortest spans, waits last.

    The rank that ends last is always among those drawn, with the first ones.
    """
    ends: dict[int, int] = {}
    for span in spans:
        ends[span.rank] = max(ends.get(span.rank, 0), span.end_ns)
    found, depth = _fewer_ranks(spans, ends, most_ranks), _depth(spans)
    full = depth
    while len(found) > most_spans and depth > 2:
        depth -= 1
        found = merged(found, depth)
    ranks = min(most_ranks, len(ends))
    while len(found) > most_spans and ranks > 1:
        ranks -= 1
        found = _fewer_ranks(found, ends, ranks)
    shortest = max(0, len(found) - most_spans)
    if shortest:
        found = _longest(found, most_spans)
    left_out = []
    if ranks < len(ends):
        slowest = max(ends, key=lambda rank: (ends[rank], -rank))
        left_out.append(f"{ranks} of {len(ends)} ranks are drawn, among them rank {slowest}, which ends last")
    if depth < full:
        left_out.append(f"compute is drawn by modules of {depth} names at most")
    if shortest:
        left_out.append(f"{shortest} of the shortest spans are not drawn")
    return Drawn(tuple(found), tuple(left_out))


def _longest(spans: Sequence[Span], most: int) -> list[Span]:
    """Waits before all others, since they are what one looks for; of equally long ones, some from everywhere."""
    order = sorted(
        range(len(spans)),
        key=lambda i: (spans[i].kind != "wait", spans[i].start_ns - spans[i].end_ns, jitter(i)),
    )
    return [spans[i] for i in sorted(order[:most])]


def _depth(spans: Iterable[Span]) -> int:
    """Most names that a module's FQN has."""
    return max((label.count(".") + 1 for label in {span.label for span in spans if span.kind == "compute"}), default=1)


def _fewer_ranks(spans: Sequence[Span], ends: Mapping[int, int], most: int) -> Sequence[Span]:
    if len(ends) <= most:
        return spans
    slowest = max(ends, key=lambda rank: (ends[rank], -rank))
    kept = {slowest, *[rank for rank in sorted(ends) if rank != slowest][: most - 1]}
    return [span for span in spans if span.rank in kept]


def merged(spans: Iterable[Span], depth: int) -> list[Span]:
    """Spans with compute's modules cut to ``depth`` names, and compute of one name in a row on a stream made one span."""
    result: list[Span] = []
    last: dict[tuple[int, str], int] = {}
    for span in sorted(spans, key=lambda span: (span.rank, span.stream, span.start_ns, span.end_ns)):
        key = span.rank, span.stream
        if span.kind == "compute":
            span = replace(span, label=_cut(span.label, depth))
            before = result[last[key]] if key in last else None
            if before is not None and _goes_on(before, span):
                result[last[key]] = replace(before, end_ns=span.end_ns)
                continue
        last[key] = len(result)
        result.append(span)
    return result


def _goes_on(before: Span, span: Span) -> bool:
    same = (before.kind, before.label, before.direction) == (span.kind, span.label, span.direction)
    return same and before.end_ns == span.start_ns


def _cut(label: str, depth: int) -> str:
    if label.startswith(_COPIES):
        return label
    return ".".join(label.split(".")[:depth])
