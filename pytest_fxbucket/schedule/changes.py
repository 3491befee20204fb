"""What changed between two goldens, in words: first the mesh and the graphs, then buckets, then launches, waits and updates."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pytest_fxbucket.schedule.alike import fold_alike
from pytest_fxbucket.schedule.bucket_changes import bucket_sentences
from pytest_fxbucket.schedule.crossings import crossings
from pytest_fxbucket.schedule.event_changes import event_sentences
from pytest_fxbucket.schedule.pairs import paired
from pytest_fxbucket.schedule.read_back import ReadGraph, read_back
from pytest_fxbucket.schedule.sections import in_order
from pytest_fxbucket.schedule.within import PART


def changes(old: str, new: str) -> list[str]:
    """Sentences on how the golden's body ``new`` differs from ``old``; layers of which the same is said are one sentence.

    The plan's name is none of the schedule's business and passed over.
    """
    a, b = read_back(old), read_back(new)
    sentences = [*_header(a.header, b.header)]
    sentences += [f"graph {phase} is gone" for phase in a.graphs if phase not in b.graphs]
    sentences += [f"graph {phase} is new" for phase in b.graphs if phase not in a.graphs]
    phases = [phase for phase in a.graphs if phase in b.graphs]
    for phase in phases:
        prefix = f"graph {phase}: " if len(phases) > 1 else ""
        sentences += [prefix + sentence for sentence in _graph(a.graphs[phase], b.graphs[phase])]
    return [block[0] for block in fold_alike([(sentence,) for sentence in sentences])]


def _header(old: list[str], new: list[str]) -> Iterator[str]:
    before = dict(line.partition(" ")[::2] for line in old)
    after = dict(line.partition(" ")[::2] for line in new)
    for name in sorted(before | after):
        if name != "plan" and before.get(name) != after.get(name):
            yield f"{name} changed: {before.get(name, 'none')} -> {after.get(name, 'none')}"


def _graph(old: ReadGraph, new: ReadGraph) -> Iterator[str]:
    pairs = paired(old.buckets, new.buckets)
    said = list(bucket_sentences(pairs))
    yield from said
    if not said and [one.entry for one in old.buckets] != [one.entry for one in new.buckets]:
        yield "the entries stand in another order"
    crossed, sentences = crossings(old.events, new.events)
    yield from sentences
    before, after = (_without(graph, crossed) for graph in (old, new))
    for section in in_order((*before, *after)):
        yield from event_sentences(section, before.get(section, []), after.get(section, []), pairs)


def _without(graph: ReadGraph, updates: Collection[str]) -> dict[str, list[str]]:
    """Events by section, without ``updates``, of which enough is said."""
    return {
        section: [event for event in events if PART.sub("", event) not in updates] for section, events in graph.events.items()
    }
