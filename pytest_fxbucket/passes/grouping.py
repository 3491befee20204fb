"""Sorts launches into buckets: by what the plan says, by size, and so that no member needs another member's result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.passes.circles import without_circles

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.targets import Target

Group = tuple["Target", ...]
"""Members of one bucket in byte order."""

MB = 1 << 20
BUCKETED = "fxbucket_bucketed"
"""Mark of a launch that this pass has bucketed already: a second run leaves it as it is."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Which launches share a bucket. The defaults are those of a plan file."""

    merging: bool = True
    by: Literal["plan", "size"] = "plan"
    layout: Literal["registration", "execution"] = "registration"
    mixed: bool = False
    """An all-gather may carry several dtypes."""
    caps_mb: tuple[float, ...] = (0.0,)
    """Cap for the buckets of each entry in turn (by size: of each bucket), the last for the rest; 0: none. In 2**20 bytes."""


def groups_of(order: Order, targets: Sequence[Target], rules: Rules, entries: Sequence[str]) -> list[Group]:
    """Buckets in order of their first launch, each in byte order.

    ``targets`` are in order of launch, ``entries`` in the plan's. Members of a bucket do not depend on each other, and buckets
    form no circle: both hold in as few launches as possible for the first, and split only buckets on a circle for the second.
    """
    if not rules.merging:
        return [(target,) for target in targets]
    groups = [group for keyed in _by_key(targets, rules) for group in _capped(keyed, rules, entries)]
    groups = [level for group in _levels(order, groups) for level in group]
    groups = without_circles(order, groups)
    return sorted(groups, key=lambda group: min(order.index[target.launch] for target in group))


def _by_key(targets: Sequence[Target], rules: Rules) -> list[Group]:
    """Launches that agree in all that members of one launch must agree in; a launch of several dtypes stays alone."""
    found: dict[tuple[object, ...], list[Target]] = {}
    for target in targets:
        dtype: object = str(target.dtype)
        if rules.mixed and target.kind == "all_gather":
            dtype = "mixed"
        elif target.dtype is None:
            dtype = target.launch.name
        if target.launch.meta.get(BUCKETED):
            dtype = target.launch.name
        key = (target.entry, target.direction, target.kind, target.group, target.op, target.device, target.ranks, dtype)
        found.setdefault(key, []).append(target)
    return [tuple(group) for group in found.values()]


def _capped(group: Group, rules: Rules, entries: Sequence[str]) -> Iterator[Group]:
    """``group`` cut so that each part stays under its cap; a member above it stands alone."""
    if rules.by == "plan":
        place = entries.index(group[0].entry) if group[0].entry in entries else 0
        cap = rules.caps_mb[min(place, len(rules.caps_mb) - 1)]
        yield from _filled(_laid_out(group, rules), [cap])
    else:
        yield from (_laid_out(part, rules) for part in _filled(group, rules.caps_mb))


def _filled(group: Group, caps_mb: Sequence[float]) -> Iterator[Group]:
    """Neighbours fill a part until the next one does not fit; ``caps_mb`` of each part in turn, the last for the rest."""
    part: list[Target] = []
    parts, size = 0, 0
    for target in group:
        cap = caps_mb[min(parts, len(caps_mb) - 1)] * MB
        if part and cap and size + target.bytes > cap:
            yield tuple(part)
            part, size, parts = [], 0, parts + 1
        part.append(target)
        size += target.bytes
    yield tuple(part)


def _laid_out(group: Group, rules: Rules) -> Group:
    return tuple(sorted(group, key=lambda target: target.place)) if rules.layout == "registration" else group


def _levels(order: Order, groups: Sequence[Group]) -> list[list[Group]]:
    """Each group parted so that no member of a part needs another member's result, in as few parts as possible.

    One walk: each node knows the parts (as bits of one number) that it depends on; a member joins the first part of its group
    that it does not depend on, so the parts are as many as the longest chain of members.
    """
    home = {order.index[target.launch]: (number, target) for number, group in enumerate(groups) for target in group}
    bits: dict[tuple[int, int], int] = {}
    level_of: dict[int, int] = {}
    needed: list[int] = []
    for index, before in enumerate(order.before):
        known = 0
        for earlier in before:
            known |= needed[earlier]
        if index in home:
            number, level = home[index][0], 0
            while known & (bit := bits.setdefault((number, level), 1 << len(bits))):
                level += 1
            level_of[index] = level
            known |= bit
        needed.append(known)
    return [_parted(group, [level_of[order.index[target.launch]] for target in group]) for group in groups]


def _parted(group: Group, levels: Sequence[int]) -> list[Group]:
    parts: dict[int, list[Target]] = {}
    for target, level in zip(group, levels, strict=True):
        parts.setdefault(level, []).append(target)
    return [tuple(parts[level]) for level in sorted(parts)]
