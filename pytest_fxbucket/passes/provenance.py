"""What the nodes that the pass makes say of themselves: the entry, and all that went into them.

Readers of graphs look for a node's module and line of code under keys of torch's that have room for one: there stand those of
the first member that has any, as torch's own bucketing does it. Those of all members are beside them, in lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.compat.fx_provenance import made_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.targets import Target

ENTRY, SOURCES, LAUNCHES = "fxbucket_entry", "fxbucket_sources", "fxbucket_launches"
OF_ONE = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom")
"""Keys of torch's that tell of one node; those of all are in ``bucketing_<key>_sources``."""


def shared_meta(members: Sequence[Target]) -> dict[str, Any]:
    """Metadata of a node made for ``members``: entry, FQNs in byte order, names of the launches that were there before."""
    first, launches = members[0], [member.launch for member in members]
    meta: dict[str, Any] = {
        **_of_torch(launches),
        ENTRY: first.entry,
        SOURCES: tuple(fqn for member in members for fqn in member.fqns),
        LAUNCHES: tuple(name for launch in launches for name in launch.meta.get(LAUNCHES, (launch.name,))),
    }
    if first.direction == "backward":
        meta["autograd_backward"] = True
    return meta


def sources_key(key: str) -> str:
    """Where a merged node has what its members said under ``key``."""
    return f"bucketing_{key}_sources"


def _of_torch(launches: Sequence[fx.Node]) -> dict[str, Any]:
    """What torch's bucketing writes, under the same names."""
    meta: dict[str, Any] = {}
    for key in OF_ONE:
        said = [launch.meta[key] for launch in launches if launch.meta.get(key)]
        if said:
            meta[key] = said[0]
            meta[sources_key(key)] = list(dict.fromkeys(said)) if key == "stack_trace" else said
    meta["from_node"] = [made_of(launch, "bucketing") for launch in launches]
    return meta
