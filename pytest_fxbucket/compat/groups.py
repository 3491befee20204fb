"""Process groups by the name that a graph holds (``torch._C._distributed_c10d``, in torch 2.11 to 2.14)."""

from __future__ import annotations

from typing import Any, cast


def group_ranks(name: str) -> tuple[int, ...]:
    """Global ranks of the process group called ``name``, ascending. Raises KeyError if this process has no such group."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        group = _resolve_process_group(cast(Any, name))
    except (RuntimeError, ValueError) as error:
        raise KeyError(name) from error
    return tuple(sorted(dist.get_process_group_ranks(group)))


def group_name(group: object) -> str:
    """Name under which functional collectives find ``group``."""
    return str(group.group_name)  # type: ignore[attr-defined]


def destroy_subgroups() -> None:
    """End every process group of this process but the default one, with its threads and sockets; no other rank is asked."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
