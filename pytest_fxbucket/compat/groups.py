"""Process groups by the name that a graph holds (``torch._C._distributed_c10d``, in torch 2.11 to 2.15).

Groups that we make have names of our choice, so that a graph means the same on every rank: torch's are numbers, which depend on
the order in which groups were made. A twin is a group of the same ranks as another one, for collectives that are not to queue
behind the other group's; its name says whose twin it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

_TWIN = ":gather"
DEFAULT = "0"
"""Name of the default group, under every back end."""
_made: Counter[tuple[int, str]] = Counter()
"""How often (rank, group) was made in this process: a store still has the addresses of those that are gone."""


def group_ranks(name: str) -> tuple[int, ...]:
    """Global ranks of the process group called ``name``, ascending. Raises KeyError if this process has no such group.

    A twin has the ranks of its group, made or not.
    """
    import torch.distributed as dist

    return tuple(sorted(dist.get_process_group_ranks(_group(untwinned(name)))))


def group_name(group: object) -> str:
    """Name under which functional collectives find ``group``."""
    return str(group.group_name)  # type: ignore[attr-defined]


def twin_name(name: str) -> str:
    """Name of the twin of the group ``name``; a twin has none of its own."""
    return untwinned(name) + _TWIN


def untwinned(name: str) -> str:
    """Name of the group whose twin is called ``name``; the name itself if it is no twin's."""
    return name.removesuffix(_TWIN)


def make_twin(name: str) -> None:
    """Make the twin of the group ``name``, unless there is one; all members of the group must ask, in one order of groups.

    It has its group's back end, and ends with the groups of the job. Raises KeyError if this process has no such group.
    """
    import torch.distributed as dist

    make_group(twin_name(name), dist.get_process_group_ranks(_group(untwinned(name))), like=untwinned(name))


def make_group(name: str, ranks: Sequence[int], like: str = "") -> None:
    """Make the group ``name`` of the global ``ranks``, unless there is one; all of them must ask, in one order of groups.

    It has the back end of the group ``like``, or of the default one.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.distributed_c10d import _get_default_store, _new_process_group_helper, _world

    if name in _world.pg_names.values():
        return
    members, rank = list(ranks), dist.get_rank()
    back_end = dist.get_backend(_group(like) if like else dist.group.WORLD)
    _made[rank, name] += 1
    # A name says what a group is, not which one: its first rank tells those along one dimension apart in the store.
    store = PrefixStore(f"{name} {members[0]} {_made[rank, name]}", _get_default_store())
    # What new_group does, but for the name, which it does not let one choose.
    made, _ = _new_process_group_helper(
        len(members), members.index(rank), members, back_end, store, cast(Any, name), timeout=default_pg_timeout
    )
    _world.pg_group_ranks[made] = {member: index for index, member in enumerate(members)}


def destroy_subgroups() -> None:
    """End every process group of this process but the default one, with its threads and sockets; no other rank is asked."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from pytest_fxbucket.compat.dtensor import forget_meshes

    forget_meshes()
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _group(name: str) -> Any:
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(cast(Any, name))
    except (RuntimeError, ValueError) as error:
        raise KeyError(name) from error
