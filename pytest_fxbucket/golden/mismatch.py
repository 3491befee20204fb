"""The message for a golden that does not fit: what changed in words, a capped diff, the command that accepts it.

The words speak first of the mesh and the graphs, then of the buckets, then of launches, waits and updates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from difflib import unified_diff
from pathlib import Path

from pytest_fxbucket.golden.mismatch_buckets import bucket_sentences
from pytest_fxbucket.golden.mismatch_events import PART, crossings, event_sentences
from pytest_fxbucket.golden.read_back import ReadGraph, paired, read_back
from pytest_fxbucket.golden.schedule import in_order
from pytest_fxbucket.golden.text import fold_alike

_AFTER_NAME = re.compile(r": |, | (?=on pp |in stages )")
"""What stands between name and rest in the lines on pipeline stages (:func:`pytest_fxbucket.pipeline.text.stage_lines`)."""
_MOST_WORDS = 40
_MOST_DIFF = 60


def change_lines(old: str, new: str, names: tuple[str, str] = ("golden", "found"), rest: Path | None = None) -> list[str]:
    """What changed from body ``old`` to body ``new`` in words, then the diff; a long diff is whole in the file ``rest``."""
    words = changes(old, new) or [_header_words(old, new)]
    diff = list(unified_diff(_lines(old), _lines(new), *names, lineterm="", n=2))
    return [
        "what changed:",
        *(f"  {word}" for word in words[:_MOST_WORDS]),
        *([f"  ... and {len(words) - _MOST_WORDS} more changes"] if len(words) > _MOST_WORDS else []),
        "",
        *capped(diff, [f"# {word}" for word in words], rest),
    ]


def mismatch_lines(accepted: str, found: str, command: str, rest: Path | None = None) -> list[str]:
    """What changed, in words and as a diff, then the command that accepts it."""
    return [*change_lines(accepted, found, rest=rest), "", f"to accept: {command}"]


def _lines(text: str) -> list[str]:
    """The lines of ``text``, split at line feeds only: names may hold other characters that ``splitlines`` splits at."""
    return text.removesuffix("\n").split("\n")


def _header_words(old: str, new: str) -> str:
    """What differs between two texts whose schedules are the same, in words."""
    plans = [text.partition("\n")[0].removeprefix("plan ") for text in (old, new)]
    if plans[0] != plans[1]:
        return f"the text is of {plans[0]}, and this is {plans[1]}"
    return "the text changed, but no bucket, launch, wait or compute did"


def capped(diff: Sequence[str], head: Sequence[str] = (), rest: Path | None = None) -> list[str]:
    """The first 60 lines of ``diff``. A longer one is written whole, below ``head``, to ``rest``, which the last line names."""
    more = len(diff) - _MOST_DIFF
    if more <= 0:
        return list(diff)
    if rest is not None:
        rest.parent.mkdir(parents=True, exist_ok=True)
        rest.write_text("\n".join([*head, *diff]) + "\n", encoding="utf-8")
    return [*diff[:_MOST_DIFF], f"... and {more} more lines of diff" + (f", all in {rest}" if rest else "")]


def changes(old: str, new: str) -> list[str]:
    """Sentences on how the golden's body ``new`` differs from ``old``; layers that changed alike share one sentence.

    The plan's name is no part of the schedule and is ignored.
    """
    a, b = read_back(old), read_back(new)
    sentences = [*_header(a.header, b.header)]
    sentences += [f"graph {phase} is gone" for phase in a.graphs if phase not in b.graphs]
    sentences += [f"graph {phase} is new" for phase in b.graphs if phase not in a.graphs]
    phases = [phase for phase in a.graphs if phase in b.graphs]
    for phase in phases:
        prefix = f"graph {phase}: " if len(phases) > 1 else ""
        sentences += [prefix + sentence for sentence in _graph(a.graphs[phase], b.graphs[phase])]
    # A sentence is a block of one line here, and those that differ in a layer's index become one.
    return [block[0] for block in fold_alike([(sentence,) for sentence in sentences])]


def _header(old: list[str], new: list[str]) -> Iterator[str]:
    before, after = _by_name(old), _by_name(new)
    for name in before | after:
        if name != "plan" and before.get(name) != after.get(name):
            yield f"{name} changed: {before.get(name, 'none')} -> {after.get(name, 'none')}"


def _by_name(header: list[str]) -> dict[str, str]:
    """What each line says, by its name: ``mesh``; below ``pipeline`` with those above it, ``stage 0, forward to stage 1``."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in header:
        text = line.lstrip()
        indent = len(line) - len(text)
        name, said = _AFTER_NAME.split(text, maxsplit=1) if indent else text.partition(" ")[::2]
        above = [one for one in above if 0 < one[0] < indent]
        key = ", ".join([*(one for _, one in above), name])
        above.append((indent, name))
        # Several tensors of one module may cross to the same stage.
        while key in found:
            key += " again"
        found[key] = said
    return found


def _graph(old: ReadGraph, new: ReadGraph) -> Iterator[str]:
    pairs = paired(old.buckets, new.buckets)
    # Buckets are paired first: events name buckets, and a bucket that only has another name now has lost no launch.
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
    """Events by section, without ``updates``, on which a sentence was given already."""
    return {
        section: [event for event in events if PART.sub("", event) not in updates] for section, events in graph.events.items()
    }
