"""Parts a bucket so that no member needs another member's result, in as few parts as possible.

One walk: each node knows the parts (as bits of one number) that it depends on; a member joins the first part of its bucket
that it does not depend on, so the parts are as many as the longest chain of members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.passes.splits import Split, called

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.targets import Target

Group = tuple["Target", ...]
Leveled = list[tuple[Group, tuple[Split, ...]]]
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
            while known & (bit := bits.setdefault((number, level), 1 << len(bits))):
                level += 1
            level_of[index] = level
            known |= bit
        needed.append(known)

    def why(number: int, level: int, member: Target) -> Split:
        """A member one level below that ``member`` needs: every node with the bit has one behind it, so no step is in vain."""
        bit, index = bits[number, level - 1], order.index[member.launch]
        while True:
            index = max(earlier for earlier in order.before[index] if needed[earlier] & bit)
            if index in home and (home[index][0], level_of[index]) == (number, level - 1):
                return _dependence(member, home[index][1])

    found: list[Leveled] = []
    for number, group in enumerate(groups):
        parts = _parted(group, [level_of[order.index[target.launch]] for target in group])
        reasons = [why(number, level, parts[level][0]) for level in range(1, len(parts))]
        # The first part is told by what made the second.
        reasons = [*reasons[:1], *reasons]
        found.append([(part, tuple(reasons[level : level + 1])) for level, part in enumerate(parts)])
    return found


def _parted(group: Group, levels: Sequence[int]) -> list[Group]:
    """Members by level; a member of a level needs one of the level below, so none is empty."""
    parts: dict[int, list[Target]] = {}
    for target, level in zip(group, levels, strict=True):
        parts.setdefault(level, []).append(target)
    return [tuple(parts[level]) for level in sorted(parts)]


def _dependence(member: Target, needed: Target) -> Split:
    names = called(member), called(needed)
    if names[0] == names[1]:
        names = f"{names[0]} ({member.launch.name})", f"{names[1]} ({needed.launch.name})"
    return Split("dependence", names[0], names[1:])
