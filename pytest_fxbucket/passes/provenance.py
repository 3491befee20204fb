"""What the nodes that the pass makes say of themselves: the entry, and all that went into them; never one member's module.

Neither ``stack_trace`` nor torch's ``from_node`` is set: both tell of one node that a node came from, and one member's would
blame a line of the model for what its neighbours do. ``fxbucket_launches`` names what was merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.passes.targets import Target

ENTRY, SOURCES, LAUNCHES = "fxbucket_entry", "fxbucket_sources", "fxbucket_launches"


def shared_meta(members: Sequence[Target]) -> dict[str, Any]:
    """Metadata of a node made for ``members``: entry, FQNs in byte order, names of the launches that were there before."""
    first = members[0]
    meta: dict[str, Any] = {
        ENTRY: first.entry,
        SOURCES: tuple(fqn for member in members for fqn in member.fqns),
        LAUNCHES: tuple(name for member in members for name in member.launch.meta.get(LAUNCHES, (member.launch.name,))),
    }
    if first.direction == "backward":
        meta["autograd_backward"] = True
    return meta
