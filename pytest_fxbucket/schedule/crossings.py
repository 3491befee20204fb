"""Updates that moved from one section to another: out of the optimizer's into the backward, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_fxbucket.schedule.within import PART

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
    """The launch, wait or compute that the first part of ``update`` stands behind."""
    at = next(at for at, event in enumerate(events) if PART.sub("", event) == update)
    last = next((event for event in reversed(events[:at]) if not event.startswith("update ")), "")
    return f", behind {PART.sub('', last)}" if last else ""
