"""Timelines that a browser can draw: fewer ranks, and compute by outer modules, as far as needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
    """At most so many ranks (the one that ends last, and the first ones) and, as far as names can be shortened, spans."""
    ends: dict[int, int] = {}
    for span in spans:
        ends[span.rank] = max(ends.get(span.rank, 0), span.end_ns)
    left_out = []
    ranks = sorted(ends)
    if len(ranks) > most_ranks:
        slowest = max(ranks, key=lambda rank: ends[rank])
        kept = sorted({slowest, *[rank for rank in ranks if rank != slowest][: most_ranks - 1]})
        left_out.append(f"{len(kept)} of {len(ranks)} ranks are drawn, among them rank {slowest}, which ends last")
        spans = [span for span in spans if span.rank in kept]
    depth = max((span.label.count(".") + 1 for span in spans if span.kind == "compute"), default=1)
    found = tuple(spans)
    while len(found) > most_spans and depth > 1:
        depth -= 1
        found = tuple(merged(spans, depth))
    if len(found) < len(spans):
        left_out.append(f"compute is drawn by modules of {depth} name{'s' if depth > 1 else ''} at most")
    return Drawn(found, tuple(left_out))


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
