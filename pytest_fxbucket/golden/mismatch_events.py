"""Sentences on launches, waits and updates: gone, new, moved past others, swapped, no longer hidden by compute.

The events that kept their order are the heaviest increasing subsequence (Fredman 1975, with a Fenwick tree of maxima). All
others have moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from pytest_fxbucket.golden.read_back import PairedBuckets
from pytest_fxbucket.golden.schedule import COMPUTING, direction_of


def heaviest_increasing(places: Sequence[int], weights: Sequence[int]) -> set[int]:
    """Indices of the heaviest increasing subsequence of ``places``, which are distinct numbers from 0 on.

    Takes n log n. Of several equally heavy ones it is always the same that is found.
    """
    # ``best`` is a Fenwick tree over places: a query gives the heaviest subsequence that ends below a place, by its end.
    # ``before`` links each index to the one before it in its own subsequence, and the result is read backwards along it.
    size = max(places, default=-1) + 1
    best = [(0, -1)] * (size + 1)
    total, before = [0] * len(places), [-1] * len(places)
    for index, place in enumerate(places):
        # Slots of the tree count from 1: a query from ``place`` on is of the places below it, an update begins one higher.
        weight, source, at = 0, -1, place
        while at > 0:
            if best[at][0] > weight:
                weight, source = best[at]
            at -= at & -at
        total[index], before[index] = weight + weights[index], source
        at = place + 1
        while at <= size:
            if total[index] > best[at][0]:
                best[at] = (total[index], index)
            at += at & -at
    found: set[int] = set()
    # Of equally heavy ones the one that ends first, so that it is always the same.
    index = max(range(len(places)), key=lambda i: (total[i], -i), default=-1)
    while index >= 0:
        found.add(index)
        index = before[index]
    return found


# Launches and waits that moved into the compute of an entry, out of it, or within it.


PART = re.compile(r" \((\d+) of \d+\)$")
"""End of an event of an entry's compute that has to do with only some of its parameters: how many of how many."""
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
    # If a launch stands behind the same part of a compute as before, and that part has to do with more or fewer
    # parameters now, the launch has moved within the compute.
    parts = {name: (event, following) for name, event, following in _parts(old)}
    for name, event, following in _parts(new):
        is_inside = plain(name) in after.get(following, ()) and following not in said
        if is_inside and name in parts and parts[name][0] != event and parts[name][1] == following:
            was, now = (PART.search(one) for one in (parts[name][0], event))
            if was and now:
                way = "later" if int(now[1]) > int(was[1]) else "earlier"
                yield f"{following} moved {way} within {PART.sub('', event)}: behind{now[0]} of it,{was[0]} before"


def _surroundings(events: Sequence[str], known: Set[str]) -> dict[str, list[str]]:
    """For each launch and wait, the ``known`` compute that has parts both before and behind it."""
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
    """An event without the number that tells it from others of its name."""
    return _AGAIN.sub("", event)


# Updates that moved from one section to another: out of the optimizer's into the backward, say.


Sections = Mapping[str, Sequence[str]]
"""Events by direction, in order."""


def crossings(old: Sections, new: Sections) -> tuple[set[str], list[str]]:
    """(updates that all stand in another section now, a sentence on each)."""
    before, after = _sections(old), _sections(new)
    crossed: set[str] = set()
    sentences: list[str] = []
    for update, now in after.items():
        then = before.get(update, set())
        if len(then) == len(now) == 1 and then != now:
            (was,), (is_now,) = then, now
            crossed.add(update)
            sentences.append(f"{update} moved from {was} to {is_now}{_behind(new[is_now], update)}")
    return crossed, sentences


def _sections(events: Sections) -> dict[str, set[str]]:
    """Sections in which each update stands."""
    found: dict[str, set[str]] = {}
    for direction, here in events.items():
        for event in here:
            if event.startswith("update "):
                found.setdefault(PART.sub("", event), set()).add(direction)
    return found


def _behind(events: Sequence[str], update: str) -> str:
    """A clause that names the last launch, wait or compute before the first part of ``update``; empty if there is none."""
    at = next(at for at, event in enumerate(events) if PART.sub("", event) == update)
    last = next((event for event in reversed(events[:at]) if not event.startswith("update ")), "")
    return f", behind {PART.sub('', last)}" if last else ""


@dataclass(frozen=True, slots=True)
class _Moved:
    event: str
    is_later: bool
    past: tuple[str, ...]
    """Events, in order, that it stood before and stands behind now, or the other way round."""


def event_sentences(section: str, old: Sequence[str], new: Sequence[str], paired: PairedBuckets) -> Iterator[str]:
    """Sentences on the events of one section; a bucket that was renamed is called by its new name."""
    # Old events are renamed to the labels of the buckets they are paired with, and events of lost and new buckets are left out,
    # so that equal names in both lists are the same event. What only one list has is gone or new; the rest may have moved.
    direction = direction_of(section)
    names = {a.label: b.label for a, b in paired.pairs if a.direction == direction}
    lost, fresh = ({one.label for one in buckets if one.direction == direction} for buckets in (paired.lost, paired.new))
    old, new = _without(old, lost), _without(new, fresh)
    before, after = _distinct(old, names), _distinct(new, {})
    shared = set(before) & set(after)
    for events, others, what in ((before, shared, "gone"), (after, shared, "new")):
        lone = [event for event in events if event not in others]
        known = {plain(event) for event in (after if what == "gone" else before)}
        # Compute that others cut into more or fewer parts than before is not new and not gone.
        lone = [event for event in lone if not _computes(event) or plain(event) not in known]
        yield from (f"{section}: {event} is {what}" for event in lone if event.partition(" ")[2] not in lost | fresh)
    moved = list(_moved([e for e in before if e in shared], [e for e in after if e in shared]))
    hidden, still_hidden = _hidden(before), _hidden(after)
    unhidden = [label for label, count in hidden.items() if count and still_hidden.get(label) == 0]
    swapped: set[str] = set()
    for one in moved:
        if one.event not in swapped:
            yield f"{section}: {_moved_sentence(one, swapped)}{_lost(one.event.partition(' ')[2], unhidden)}"
    said = swapped | {one.event for one in moved}
    labels = {event.partition(" ")[2] for event in said}
    yield from (f"{section}: {label}{_lost(label, unhidden)}" for label in unhidden if label not in labels)
    yield from (f"{section}: {sentence}" for sentence in within_sentences((before, old), (after, new), said))


def _without(events: Sequence[str], labels: Set[str]) -> list[str]:
    """``events`` without those of the lost or new buckets called ``labels``: another bucket may have such a name by now."""
    return [event for event in events if _computes(event) or event.partition(" ")[2] not in labels]


def _distinct(events: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Events under their new names, made distinct: the second of a name is ``name (2)``. Compute is without its part."""
    seen: dict[str, int] = {}
    out = []
    for event in events:
        what, _, label = event.partition(" ")
        name = PART.sub("", event) if what in COMPUTING else f"{what} {names.get(label, label)}"
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return out


def _moved(old: Sequence[str], new: Sequence[str]) -> Iterator[_Moved]:
    """Launches, waits and updates that have moved among the others; compute stands, since what it hides is what matters."""
    place = {event: at for at, event in enumerate(old)}
    # One compute outweighs all launches and waits together, so these are said to have moved past it, not it past them. An
    # update is said to move rather than a launch or a wait.
    weights = [2 * len(new) if event.startswith("compute ") else 1 if _computes(event) else 2 for event in new]
    still = heaviest_increasing([place[event] for event in new], weights)
    stood = [event for at, event in enumerate(new) if at in still]
    new_place = {event: at for at, event in enumerate(new)}
    for at, event in enumerate(new):
        if at in still:
            continue
        passed = [e for e in stood if (place[e] < place[event]) != (new_place[e] < at)]
        is_later = bool(passed) and place[passed[0]] > place[event]
        yield _Moved(event, is_later, tuple(passed))


def _moved_sentence(one: _Moved, swapped: set[str]) -> str:
    way = "later" if one.is_later else "earlier"
    if len(one.past) == 1 and one.event.startswith("launch ") and one.past[0].startswith("launch "):
        swapped.add(one.past[0])
        first, second = (one.event, one.past[0]) if one.is_later else (one.past[0], one.event)
        return f"{first} and {second} swapped: {second.removeprefix('launch ')} is launched first now"
    if not one.past:
        return f"{one.event} moved"
    first, last = one.past[0], one.past[-1]
    past = first if len(one.past) == 1 else f"{first} and {last}"
    return f"{one.event} moved {way} past {past if len(one.past) < 3 else f'{first} ... {last} ({len(one.past)} events)'}"


def _hidden(events: Sequence[str]) -> dict[str, int]:
    """For each label that has a launch and a wait, how many events of compute stand between them."""
    launched: dict[str, int] = {}
    found: dict[str, int] = {}
    computed = 0
    for event in events:
        what, _, label = event.partition(" ")
        if what == "launch":
            launched[label] = computed
        elif what == "wait" and label in launched:
            found[label] = computed - launched[label]
        computed += what in COMPUTING
    return found


def _lost(label: str, unhidden: Sequence[str]) -> str:
    if label not in unhidden:
        return ""
    return f"; {'prefetch' if label.startswith('all_gather ') else 'overlap'} lost, no compute hides it now"


def _computes(event: str) -> bool:
    return event.partition(" ")[0] in COMPUTING
