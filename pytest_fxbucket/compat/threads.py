"""Process groups of one rank, put in and taken out in a process that plays several (private names of torch 2.11 to 2.15).

Torch has a thread isolation mode for its registry of process groups, for tests of its own. It is not used here: a rank may run
on several threads (autograd's, its own), and must see its groups on all of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

# Globals of torch.distributed.distributed_c10d, for which its ``_world`` has properties only.
_GLOBALS = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_group_count",
    "_tags_to_pg",
    "_pg_to_tag",
    "_default_pg_init_method",
)
_OF_WORLD = ("_default_pg", "_pg_coalesce_state", "_comms")
_DTENSOR_RANDOM = "torch.distributed.tensor._random"


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank, as all of torch's tables have them; by default there are none."""

    tables: dict[str, Any] = field(default_factory=lambda: {name: _nothing(name) for name in _GLOBALS})
    world: dict[str, Any] = field(default_factory=lambda: {name: _nothing(name) for name in _OF_WORLD})
    dtensor_random: Any = None
    """DTensor's tracker of random numbers; what it draws depends on the rank's mesh."""


def take_groups() -> Groups:
    """The process groups that this process has now."""
    from torch.distributed import distributed_c10d as c10d

    # Only what this torch has: not every version has each of these names.
    random = sys.modules.get(_DTENSOR_RANDOM)
    return Groups(
        {name: getattr(c10d, name) for name in _GLOBALS if hasattr(c10d, name)},
        {name: getattr(c10d._world, name) for name in _OF_WORLD if hasattr(c10d._world, name)},
        getattr(random, "_rng_tracker", None),
    )


def put_groups(groups: Groups) -> None:
    """Make ``groups`` the process groups of this process, in place of all others."""
    from torch._C._distributed_c10d import _register_process_group, _set_global_rank, _unregister_all_process_groups
    from torch.distributed import distributed_c10d as c10d

    for name, value in groups.tables.items():
        setattr(c10d, name, value)
    for name, value in groups.world.items():
        setattr(c10d._world, name, value)
    # Python's tables are not all: functional collectives find groups by name in a registry in C++.
    _unregister_all_process_groups()
    for group, name in groups.tables["_pg_names"].items():
        _register_process_group(name, group)
    default = groups.world["_default_pg"]
    _set_global_rank(-1 if default is None else default.rank())
    random = sys.modules.get(_DTENSOR_RANDOM)
    if random is not None:
        random._rng_tracker = groups.dtensor_random  # type: ignore[attr-defined]  # torch declares it nowhere


def _nothing(name: str) -> Any:
    if name in ("_group_count", "_default_pg_init_method", "_default_pg"):
        return 0 if name == "_group_count" else None
    return [] if name == "_comms" else {}


def let_python_groups_gather_into_given_tensors() -> None:
    """Make the ``_out`` forms of functional collectives work on Python groups; torch has them for C++ back ends only.

    It holds for all of this process, and for good. Idempotent.
    """
    import torch
    import torch.distributed._functional_collectives
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        ProcessGroup,
        ReduceScatterOptions,
        _register_work,
        _resolve_process_group,
    )
    from torch.distributed import ReduceOp

    def group_of(group: Any) -> Any:
        return _resolve_process_group(cast(Any, group)) if isinstance(group, str) else ProcessGroup.unbox(group)

    def all_gather(source: torch.Tensor, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
        _register_work(out, group_of(group)._allgather_base(out, source, AllgatherOptions()))
        return out

    def reduce_scatter(source: torch.Tensor, operation: str, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
        options = ReduceScatterOptions()
        options.reduceOp = ReduceOp(getattr(ReduceOp, operation.upper()))
        _register_work(out, group_of(group)._reduce_scatter_base(out, source, options))
        return out

    if not _libraries:
        library: Any = cast(Any, torch.library.Library)("_c10d_functional", "IMPL")
        _libraries.append(library)
        for device in ("CPU", "CUDA"):
            library.impl("all_gather_into_tensor_out", all_gather, device)
            library.impl("reduce_scatter_tensor_out", reduce_scatter, device)


def leave_python_groups_unrecorded() -> None:
    """Keep the flight recorder of torch 2.15 from Python groups: it asks for the name of a C++ back end, which they lack.

    It holds for all of this process, and for good. Idempotent.
    """
    from torch.distributed import distributed_c10d as c10d

    attach: Any = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is None or hasattr(attach, "__wrapped__"):
        return

    @wraps(attach)
    def attach_to_others(group: Any, *rest: Any) -> None:
        # The base class's own property, past what a class in Python has in its place: it lists devices of C++ back ends.
        if vars(c10d.ProcessGroup)["_device_types"].__get__(group):
            attach(group, *rest)

    c10d._maybe_attach_flight_recorder = attach_to_others  # type: ignore[attr-defined]  # torch declares it nowhere


def guard_devices() -> None:
    """Have this thread own the guard that torch puts in place of CUDA's without a GPU; threads of ranks end before this one.

    In a CUDA build of torch 2.11 the guard belongs to the first thread that enters a FakeTensorMode, as DTensor does. Once that
    thread has ended, the next one that needs the guard dies by SIGSEGV.
    """
    import torch

    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


# Kept alive: when a library is collected, what it registered is gone.
_libraries: list[Any] = []
