"""Sorts launches into buckets: by what the plan says, by size, and so that no member needs another member's result.

Each step that parts what could have been one bucket notes why (:mod:`pytest_fxbucket.passes.report`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pytest_fxbucket.graph.modules import OTHER_DIRECTION
from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.passes.arrange import without_circles
from pytest_fxbucket.passes.bucketer import laid_out, name_of
from pytest_fxbucket.passes.report import Reason, SplitReason, called

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.bucketer import Bucketer
    from pytest_fxbucket.passes.targets import MergeTarget
    from pytest_fxbucket.plan.schema_bucket import Bucket

Group = tuple["MergeTarget", ...]
"""Members of one bucket in byte order."""
Part = tuple[Group, tuple[SplitReason, ...]]
"""A bucket, also in the making, and what parted it from others of the same entry, direction and kind."""
Family = tuple[str, str, str]
"""Entry, direction and kind: what would be one bucket if nothing parted it."""

MB = 1 << 20
BUCKETED = "fxbucket_bucketed"
"""Mark of a launch that this pass has bucketed already: a second run leaves it as it is."""


class HiddenWhenMerged(Protocol):
    """Knows what stays hidden as one launch."""

    def parts(self, groups: Sequence[Group], cap: float) -> list[list[Group]]:
        """Split each of ``groups``, whose members may share a launch, into parts that stay hidden as one launch.

        ``cap`` is the most bytes that a part may have; 0: no cap.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Key:
    """What members of one launch must agree in, besides entry, direction and kind."""

    group: str
    op: str
    device: str
    ranks: int
    dtype: str
    round: str
    """Which gather of its parameters in its direction it is: a round, or a gather of what was gathered."""
    alone: str
    """Node of a launch that stays as it is; empty if it may be merged."""
    together: str
    """Name that the bucketer gives it."""


def named(targets: Sequence[MergeTarget], bucketer: Bucketer) -> tuple[MergeTarget, ...]:
    """``targets`` with the names that ``bucketer`` gives them. A name that launches of several entries get becomes their entry.

    Raises :class:`PlanError` for what is no name.
    """
    names = [target.entry if target.launch.meta.get(BUCKETED) else name_of(bucketer, target) for target in targets]
    entries: dict[str, set[str]] = {}
    for target, name in zip(targets, names, strict=True):
        entries.setdefault(name, set()).add(target.entry)
    return tuple(
        replace(target, together=name, entry=name if len(entries[name]) > 1 else target.entry)
        for target, name in zip(targets, names, strict=True)
    )


def grouping_of(
    order: Order,
    targets: Sequence[MergeTarget],
    bucketer: Bucketer,
    entries: Sequence[str],
    hiding: HiddenWhenMerged | None = None,
) -> list[Part]:
    """Sort ``targets``, in order of launch, into the buckets that ``bucketer`` asks for, in order of their first launch.

    ``targets`` are as :func:`named` gives them, ``entries`` in the plan's order; ``hiding`` says for ``by = "overlap"`` what
    stays hidden as one launch. Each bucket comes with the reasons that parted it from others, those of the other direction too.

    Members of a bucket do not depend on each other: a bucket is split into the fewest launches for which that holds. Buckets do
    not wait for each other in a circle: only buckets that lie on one are split. Raises :class:`PlanError` for a
    :meth:`Bucketer.in_order` that does not give each member once.
    """
    parts = _parts(order, targets, bucketer, entries, hiding) if bucketer.rules.enabled else _apart(targets)
    parts.sort(key=lambda part: min(order.index[target.launch] for target in part[0]))
    directions = _directions(targets)
    return [(group, (*splits, *directions.get(_family(group[0]), ()))) for group, splits in parts]


def _parts(
    order: Order, targets: Sequence[MergeTarget], bucketer: Bucketer, entries: Sequence[str], hiding: HiddenWhenMerged | None
) -> list[Part]:
    # Each step splits what the step before left together, and adds its reason. Circles come last, since they can only be looked
    # for between buckets whose own members do not depend on each other.
    keyed = _by_key(targets, bucketer.rules)
    if hiding is None:
        capped = [(part, (*splits, *more)) for group, splits in keyed for part, more in _capped(group, bucketer, entries)]
    else:
        capped = list(_hidden(keyed, bucketer, hiding))
    levels = [
        (level, (*splits, *more))
        for (_, splits), parted in zip(capped, leveled(order, [group for group, _ in capped]), strict=True)
        for level, more in parted
    ]
    found: list[Part] = []
    for (_, splits), parts in zip(levels, without_circles(order, [group for group, _ in levels]), strict=True):
        found += [(part, (*splits, *_circle(others))) for part, others in parts]
    return found


def _apart(targets: Sequence[MergeTarget]) -> list[Part]:
    """Each launch alone, as merging is off."""
    families = Counter(_family(target) for target in targets)
    return [((target,), (SplitReason("disabled"),) if families[_family(target)] > 1 else ()) for target in targets]


def _family(target: MergeTarget) -> Family:
    return target.entry, target.direction, target.kind


def _directions(targets: Sequence[MergeTarget]) -> dict[Family, tuple[SplitReason, ...]]:
    """The reason "direction" for each family whose entry has launches of the same kind in the other direction, too."""
    families = dict.fromkeys(_family(target) for target in targets)
    return {
        (entry, direction, kind): (SplitReason("direction", direction, (OTHER_DIRECTION[direction],)),)
        for entry, direction, kind in families
        if (entry, OTHER_DIRECTION[direction], kind) in families
    }


def _by_key(targets: Sequence[MergeTarget], rules: Bucket) -> list[Part]:
    """Launches that agree in all that members of one launch must agree in; a launch of several dtypes stays alone."""
    found: dict[tuple[Family, _Key], list[MergeTarget]] = {}
    for target in targets:
        found.setdefault((_family(target), _key(target, rules)), []).append(target)
    families: dict[Family, list[_Key]] = {}
    for family, key in found:
        families.setdefault(family, []).append(key)
    have = {family: _have(keys) for family, keys in families.items() if len(keys) > 1}
    return [(tuple(group), tuple(_differences(key, have.get(family, {})))) for (family, key), group in found.items()]


def _key(target: MergeTarget, rules: Bucket) -> _Key:
    dtype = "several dtypes" if target.dtype is None else dtype_name(target.dtype)
    several = target.dtype is None
    # A gather moves bytes, whatever they mean. A reduction computes with them, so it stays with one dtype.
    if rules.dtypes == "mixed" and target.kind == "all_gather":
        dtype, several = "mixed", False
    alone = target.launch.name if several or target.launch.meta.get(BUCKETED) else ""
    turn = "gathers of gathers" if target.kind == "all_gather" and target.level else f"round {target.round + 1}"
    return _Key(target.group, target.op, target.device, target.ranks, dtype, turn, alone, target.together)


_DIFFERENCES: tuple[Reason, ...] = ("group", "op", "device", "dtype", "round", "together")


def _have(keys: Sequence[_Key]) -> dict[str, list[str]]:
    """All values that the keys of one family have, by field."""
    have: dict[str, list[str]] = {f: sorted({str(getattr(key, f)) for key in keys}) for f in _DIFFERENCES}
    have["alone"] = ["alone"] if any(key.alone for key in keys) else []
    return have


def _differences(key: _Key, have: Mapping[str, Sequence[str]]) -> Iterator[SplitReason]:
    """The fields in which ``key`` differs from others of its family; ``have`` is empty if there are no others."""
    if not have:
        return
    if key.alone and key.dtype == "several dtypes":
        yield SplitReason("several_dtypes")
    elif key.alone or have["alone"]:
        yield SplitReason("bucketed")
    for field in _DIFFERENCES:
        mine = str(getattr(key, field))
        if len(have[field]) > 1:
            yield SplitReason(field, mine, tuple(other for other in have[field] if other != mine))


def _capped(group: Group, bucketer: Bucketer, entries: Sequence[str]) -> Iterator[Part]:
    """``group`` cut so that each part stays under its cap; a member above it stands alone."""
    rules = bucketer.rules
    if rules.has_entries:
        # An entry that the plan does not list is a name of the bucketer's: it has the first cap.
        place = entries.index(group[0].entry) if group[0].entry in entries else 0
        cap = rules.cap_mb[min(place, len(rules.cap_mb) - 1)]
        yield from _filled(_laid_out(group, bucketer), [cap])
    else:
        # By size, neighbours in order of launch fill a bucket, and only then its members are laid out. With entries a bucket is
        # laid out as a whole, and cut in that order.
        yield from ((_laid_out(part, bucketer), splits) for part, splits in _filled(group, rules.cap_mb))


def _hidden(keyed: Sequence[Part], bucketer: Bucketer, hiding: HiddenWhenMerged) -> Iterator[Part]:
    """``keyed`` in parts that stay hidden as one launch; what must stay alone does."""
    several = [(group, splits) for group, splits in keyed if len(group) > 1]
    yield from ((group, splits) for group, splits in keyed if len(group) == 1)
    found = hiding.parts([group for group, _ in several], bucketer.rules.cap_mb[0] * MB)
    for (_, splits), parts in zip(several, found, strict=True):
        why = (SplitReason("overlap"),) if len(parts) > 1 else ()
        yield from ((_laid_out(part, bucketer), (*splits, *why)) for part in parts)


def _filled(group: Group, caps_mb: Sequence[float]) -> Iterator[Part]:
    """Neighbours fill a part until the next one does not fit; ``caps_mb`` of each part in turn, the last for the rest."""
    part: list[MergeTarget] = []
    parts, size = 0, 0
    full: tuple[SplitReason, ...] = ()
    for target in group:
        cap_mb = caps_mb[min(parts, len(caps_mb) - 1)]
        cap = cap_mb * MB
        if part and cap and size + target.bytes > cap:
            full = (SplitReason("cap", called(target), (), size, target.bytes, cap_mb),)
            yield tuple(part), _above(part, size, cap_mb) or full
            part, size, parts = [], 0, parts + 1
        part.append(target)
        size += target.bytes
    # No cap closed the last part: what parted it is the cap that closed the one before.
    cap_mb = caps_mb[min(parts, len(caps_mb) - 1)]
    yield tuple(part), (_above(part, size, cap_mb) or full) if parts else ()


def _above(part: Sequence[MergeTarget], size: int, cap_mb: float) -> tuple[SplitReason, ...]:
    """The reason of a part whose one member is larger than the cap."""
    if len(part) == 1 and cap_mb and size > cap_mb * MB:
        return (SplitReason("above_cap", called(part[0]), (), size, 0, cap_mb),)
    return ()


def _laid_out(group: Group, bucketer: Bucketer) -> Group:
    """``group`` in the bucketer's order, which is not asked about a single member."""
    return laid_out(bucketer, group) if len(group) > 1 else group


def _circle(others: Sequence[Group]) -> tuple[SplitReason, ...]:
    """The reason of a part whose bucket lay on a circle with ``others``."""
    names = (f"the {group[0].kind} of {group[0].entry or called(group[0])}" for group in others)
    return (SplitReason("circle", "", tuple(sorted(dict.fromkeys(names)))),) if others else ()


# Parts a bucket so that no member needs another member's result, in as few parts as possible.
#
# One walk: each node knows the parts (as bits of one number) that it depends on; a member joins the first part of its bucket
# that it does not depend on, so the parts are as many as the longest chain of members.


Leveled = list[tuple[Group, tuple[SplitReason, ...]]]
"""Parts of one bucket, and why it was parted; nothing if it was not."""


def leveled(order: Order, groups: Sequence[Group]) -> list[Leveled]:
    """The parts of each of ``groups``."""
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
            # A level that no member has reached yet gets a new bit, on which nothing depends: there the search ends.
            while known & (bit := bits.setdefault((number, level), 1 << len(bits))):
                level += 1
            level_of[index] = level
            known |= bit
        needed.append(known)

    def why(number: int, level: int, member: MergeTarget) -> SplitReason:
        """Why ``member`` is not one level lower: the member there that it needs.

        A node has the bit of that level only if it depends on a member of it, so following nodes with the bit finds one.
        """
        bit, index = bits[number, level - 1], order.index[member.launch]
        while True:
            index = max(earlier for earlier in order.before[index] if needed[earlier] & bit)
            if index in home and (home[index][0], level_of[index]) == (number, level - 1):
                return _dependence(member, home[index][1])

    found: list[Leveled] = []
    for number, group in enumerate(groups):
        parts = _parted(group, [level_of[order.index[target.launch]] for target in group])
        reasons = [why(number, level, parts[level][0]) for level in range(1, len(parts))]
        # Nothing keeps the first part from a lower level, so it gets the reason that made the second part.
        reasons = [*reasons[:1], *reasons]
        found.append([(part, tuple(reasons[level : level + 1])) for level, part in enumerate(parts)])
    return found


def _parted(group: Group, levels: Sequence[int]) -> list[Group]:
    """Members by level; a member of a level needs one of the level below, so none is empty."""
    parts: dict[int, list[MergeTarget]] = {}
    for target, level in zip(group, levels, strict=True):
        parts.setdefault(level, []).append(target)
    return [tuple(parts[level]) for level in sorted(parts)]


def _dependence(member: MergeTarget, needed: MergeTarget) -> SplitReason:
    names = called(member), called(needed)
    if names[0] == names[1]:
        names = f"{names[0]} ({member.launch.name})", f"{names[1]} ({needed.launch.name})"
    return SplitReason("dependence", names[0], names[1:])
