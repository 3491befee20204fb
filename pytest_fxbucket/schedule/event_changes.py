"""What became of launches, waits and updates, in words: gone, new, moved past what, swapped, no longer hidden by compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_fxbucket.schedule.events import COMPUTING
from pytest_fxbucket.schedule.kept import kept
from pytest_fxbucket.schedule.pairs import Paired
from pytest_fxbucket.schedule.read_back import ReadBucket
from pytest_fxbucket.schedule.sections import direction_of
from pytest_fxbucket.schedule.within import PART, plain, within_sentences


@dataclass(frozen=True, slots=True)
class _Moved:
    event: str
    is_later: bool
    past: tuple[str, ...]
    """What it was before and is behind now, or the other way round, in order."""


def event_sentences(section: str, old: Sequence[str], new: Sequence[str], paired: Paired) -> Iterator[str]:
    """Sentences on the events of one section; a bucket that has another name now is called by it."""
    direction = direction_of(section)
    names = {a.label: b.label for a, b in paired.pairs if a.direction == direction}
    told = {one.label for one in (*paired.lost, *paired.new) if one.direction == direction}
    old, new = _without(old, direction, paired.lost), _without(new, direction, paired.new)
    before, after = _distinct(old, names), _distinct(new, {})
    shared = set(before) & set(after)
    for events, others, what in ((before, shared, "gone"), (after, shared, "new")):
        lone = [event for event in events if event not in others]
        known = {plain(event) for event in (after if what == "gone" else before)}
        lone = [event for event in lone if not _computes(event) or plain(event) not in known]
        yield from (f"{section}: {event} is {what}" for event in lone if event.partition(" ")[2] not in told)
    moved = list(_moved([e for e in before if e in shared], [e for e in after if e in shared]))
    unhidden = _unhidden(before, after)
    swapped: set[str] = set()
    for one in moved:
        if one.event not in swapped:
            yield f"{section}: {_told(one, swapped)}{_lost(one.event.partition(' ')[2], unhidden)}"
    said = swapped | {one.event for one in moved}
    labels = {event.partition(" ")[2] for event in said}
    yield from (f"{section}: {label}{_lost(label, unhidden)}" for label in unhidden if label not in labels)
    yield from (f"{section}: {told}" for told in within_sentences((before, old), (after, new), said))


def _without(events: Sequence[str], direction: str, told: Sequence[ReadBucket]) -> list[str]:
    """``events`` without those of the buckets ``told``, of which enough is said: another may have the name now."""
    labels = {one.label for one in told if one.direction == direction}
    return [event for event in events if _computes(event) or event.partition(" ")[2] not in labels]


def _distinct(events: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Events by their new names; compute without how much of it, the second of a name as ``name (again)`` and so on."""
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
    # an update moves rather than a launch or a wait
    weights = [2 * len(new) if _is_compute(event) else 1 if _computes(event) else 2 for event in new]
    still = kept([place[event] for event in new], weights)
    stood = [event for at, event in enumerate(new) if at in still]
    new_place = {event: at for at, event in enumerate(new)}
    for at, event in enumerate(new):
        if at in still:
            continue
        passed = [e for e in stood if (place[e] < place[event]) != (new_place[e] < at)]
        is_later = bool(passed) and place[passed[0]] > place[event]
        yield _Moved(event, is_later, tuple(passed))


def _told(one: _Moved, swapped: set[str]) -> str:
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


def _unhidden(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Labels of launches that compute hid before, and that none hides now."""
    before, after = _hidden(old), _hidden(new)
    return [label for label, count in before.items() if count and after.get(label) == 0]


def _hidden(events: Sequence[str]) -> dict[str, int]:
    """How much compute stands between the launch and the wait of each label that has both."""
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


def _is_compute(event: str) -> bool:
    return event.startswith("compute ")
