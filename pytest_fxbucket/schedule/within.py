"""Launches and waits that moved into the compute of an entry, out of it, or within it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set

PART = re.compile(r" \((\d+) of \d+\)$")
"""How many of its parameters an event of an entry's compute has to do with, where not all."""
_AGAIN = re.compile(r" \(\d+\)$")
Events = tuple[Sequence[str], Sequence[str]]
"""Distinct names of events, and the events as the text has them."""


def within_sentences(old: Events, new: Events, said: Set[str]) -> Iterator[str]:
    """Sentences on events that stayed in order, but stand at other places of the compute around them."""
    both = {plain(event) for event in old[0]} & {plain(event) for event in new[0]}
    before, after = _surroundings(old[0], both), _surroundings(new[0], both)
    for event, around in after.items():
        if event in before and event not in said:
            yield from (f"{event} stands within {compute} now" for compute in around if compute not in before[event])
            yield from (f"{event} no longer stands within {compute}" for compute in before[event] if compute not in around)
    parts = {name: (event, following) for name, event, following in _parts(old)}
    for name, event, following in _parts(new):
        is_inside = plain(name) in after.get(following, ()) and following not in said
        if is_inside and name in parts and parts[name][0] != event and parts[name][1] == following:
            was, now = (PART.search(one) for one in (parts[name][0], event))
            if was and now:
                way = "later" if int(now[1]) > int(was[1]) else "earlier"
                yield f"{following} moved {way} within {PART.sub('', event)}: behind{now[0]} of it,{was[0]} before"


def _surroundings(events: Sequence[str], known: Set[str]) -> dict[str, list[str]]:
    """Of each launch and wait the ``known`` compute that stands both before and behind it."""
    last = {plain(event): at for at, event in enumerate(events) if event.startswith("compute ")}
    last = {event: at for event, at in last.items() if event in known}
    begun: list[str] = []
    found: dict[str, list[str]] = {}
    for at, event in enumerate(events):
        if event.startswith("compute "):
            begun += [plain(event)] if plain(event) in last and plain(event) not in begun else []
        else:
            found[event] = [compute for compute in begun if last[compute] > at]
    return found


def _parts(events: Events) -> Iterator[tuple[str, str, str]]:
    """(distinct name, event as written, distinct name of the event behind it) of compute."""
    for name, event, following in zip(events[0], events[1], events[0][1:], strict=False):
        if event.startswith("compute "):
            yield name, event, following


def plain(event: str) -> str:
    """An event without which of its name it is."""
    return _AGAIN.sub("", event)
