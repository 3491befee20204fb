"""Updates: do they stand where the plan promises, have they the same inputs, and do they write behind the last reader?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promises.expectations import Expectations
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.updates import readiness
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.graph.update_provenance import Update


def update_problems(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """How ``passed`` breaks the optimizer's updates, one sentence each; ``captured`` is the graph before the pass."""
    yield from _early_writes(captured, passed)
    if not passed.problems:
        yield from _made_of(captured, passed)
    if promise.overlap.updates == "ready":
        yield from _late(promise, passed)
    # A graph that had updates among its reductions before the pass is not at fault for having them now.
    elif promise.overlap.schedule == "manual" and not list(_among_reductions(promise, captured)):
        yield from _among_reductions(promise, passed)


def _made_of(captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """Each parameter and state must be made of the same gradients and inputs as before the pass."""
    before = {(update.role, update.fqn): update for update in captured.updates}
    after = {(update.role, update.fqn): update for update in passed.updates}
    for (role, fqn), old in before.items():
        new = after.get((role, fqn))
        if new is None:
            yield f"{role} {fqn} is not updated, and was before the pass"
        elif new != old:
            yield f"the update of {role} {fqn} {_instead(old, new)}"
    for role, fqn in sorted(after.keys() - before.keys()):
        yield f"{role} {fqn} is updated, and was not before the pass"


def _instead(old: Update, new: Update) -> str:
    gained, lost = _more(new, old), _more(old, new)
    if not gained:
        return f"does not read {some(lost)}, which it read before the pass"
    return f"reads {some(gained)}" + (f", before the pass {some(lost)}" if lost else ", which it did not before the pass")


def _more(one: Update, other: Update) -> list[str]:
    """The gradients and inputs that ``one`` is made of and ``other`` is not."""
    known = set(made_of_text(other))
    return [what for what in made_of_text(one) if what not in known]


def made_of_text(update: Update) -> list[str]:
    """The gradients and inputs that ``update`` is made of, for people."""
    gradients = [f"the gradient of {fqn}" for fqn in sorted(update.gradients)]
    return [*gradients, *(f"the norm of the gradient of {fqn}" for fqn in sorted(update.norms)), *sorted(update.inputs)]


def _early_writes(captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """Whoever reads a parameter or state that is written in place must read the same value as before the pass."""
    before = {(read.fqn, read.reader): read.writers for read in captured.overwritten}
    for read in passed.overwritten:
        was = before.get((read.fqn, read.reader))
        if was is None or len(was) == len(read.writers):
            continue
        if len(read.writers) > len(was):
            yield f"{read.fqn} is written by {read.writers[len(was)]} before {read.reader} has read it"
        else:
            yield f"{read.fqn} is read by {read.reader} before {was[len(read.writers)]} has written it"


def _late(promise: Expectations, passed: GraphAnalysis) -> Iterator[str]:
    """A sentence for each entry of which an update could stand earlier, with the first thing that stands before it."""
    if passed.order is None:
        return
    waits, others = _waits(promise, passed), _others(promise, passed)
    places = [place for place, _, _ in others]
    told: set[str] = set()
    for index, ready in sorted(readiness(passed.order, passed.updating, waits).items()):
        entry = some(sorted(ready.entries))
        for place, of, what in others[bisect_right(places, ready.place) :]:
            if place > index or entry in told:
                break
            if of not in ready.entries:
                told.add(entry)
                yield (
                    f"the update of {entry} stands behind the {what}, not right behind the wait for its own reduction: "
                    'updates = "ready" is not reached'
                )


def _among_reductions(promise: Expectations, reading: GraphAnalysis) -> Iterator[str]:
    """A sentence for the first update that stands before the wait for another entry's reduction."""
    if reading.order is None or not reading.updating:
        return
    waits = _waits(promise, reading)
    last = max(waits, default=-1)
    for index, ready in sorted(readiness(reading.order, reading.updating, waits).items()):
        # What stands among the waits stands before the last of them, so it is enough to ask for that one.
        if index < last and waits[last] not in ready.entries:
            entry = some(sorted(ready.entries))
            yield f'the update of {entry} stands before the wait for the reduction of {waits[last]}, but updates = "last"'
            return


def _waits(promise: Expectations, reading: GraphAnalysis) -> dict[int, str]:
    """Positions of the waits for planned reductions, with their entry; in a plan by size, with the bucket's members."""
    return {
        where: _entry(promise, bucket.fqns)
        for bucket in reading.buckets
        if bucket.kind in REDUCTIONS and any(fqn and promise.is_planned(fqn) for fqn in bucket.fqns)
        for where in bucket.waits or (() if bucket.wait is None else (bucket.wait,))
    }


def _others(promise: Expectations, reading: GraphAnalysis) -> list[tuple[int, str, str]]:
    """(position, entry, what) of all launches, waits and computes that are not the optimizer's, in order."""
    found = []
    for bucket in reading.buckets:
        entry = _entry(promise, bucket.fqns)
        what = f"{bucket.direction} {bucket.kind}{' of ' + entry if entry else ''}"
        found.append((bucket.launch, entry, f"launch of the {what}"))
        found += [(where, entry, f"wait for the {what}") for where in bucket.waits]
    for where, direction, fqn in reading.computes:
        entry = promise.entry_of.get(fqn, fqn)
        # Without an entry it counts against all updates, those of its own entry too.
        found.append((where, "", f"{direction} compute of {entry}"))
    return sorted(one for one in found if one[0] not in reading.updating)


def _entry(promise: Expectations, fqns: Sequence[str]) -> str:
    if not promise.bucket.has_entries:
        return some(list(fqns))
    return " & ".join(promise.entries_of(fqns))
