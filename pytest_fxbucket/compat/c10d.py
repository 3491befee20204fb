"""Process groups: ``torch.distributed``'s private and C++ side, in torch 2.11 to 2.15."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch._C import _DisableTorchDispatch as without_dispatch_modes
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    FileStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    Store,
    TCPStore,
    Work,
    _resolve_process_group,
)
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from pytest_fxbucket.errors import BenchmarkError, CaptureError

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "FileStore",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "Store",
    "TCPStore",
    "Work",
    "without_dispatch_modes",
]

# Of these classes, Work and ProcessGroup may be subclassed in Python, in torch 2.11 to 2.15; the others may not.


def c10d_functional() -> Any:
    """``torch.ops._c10d_functional``, with its operators registered."""
    return torch.ops._c10d_functional


def collective(name: str, *arguments: Any) -> torch.Tensor:
    """The result of the functional collective ``name`` of ``arguments``, after its wait."""
    operators = c10d_functional()
    given: torch.Tensor = operators.wait_tensor(getattr(operators, name)(*arguments))
    return given


# TORCH_DISTRIBUTED_DEBUG: at DETAIL torch wraps each new process group, and puts a gloo group of its own beside it.


def leave_groups_unwrapped() -> Any:
    """Keep torch from wrapping new process groups, whatever the debug level is; returns the level, for ``put_back``."""
    level = c10d.get_debug_level()
    if level == c10d.DebugLevel.DETAIL:
        c10d.set_debug_level(c10d.DebugLevel.INFO)
    return level


def put_back(level: Any) -> None:
    """Set the debug level back to ``level``, as :func:`leave_groups_unwrapped` gave it."""
    c10d.set_debug_level(level)


# What DTensor remembers of meshes (``torch._C`` and ``torch.distributed.tensor._redistribute``, in torch 2.11 to 2.15).


def forget_meshes() -> None:
    """Make DTensor forget the meshes that it saw.

    Its caches tell meshes apart only by ranks and names. A mesh of a later job would find the entry of an earlier one, with
    process groups that are gone.
    """
    if "torch.distributed.tensor._redistribute" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    # The cache in C++ is one for each thread, and autograd runs the backward of a GPU on a thread of its own.
    if torch.cuda.is_initialized():
        _call_in_backward(torch._C._clear_DTensor_sharding_propagator_cache)


def _call_in_backward(function: Callable[[], None]) -> None:
    """Call ``function`` on the thread on which autograd runs backward of tensors on the GPU."""
    with torch.inference_mode(False), torch.enable_grad():
        on_gpu = torch.zeros((), device="cuda", requires_grad=True).clone()
        on_gpu.register_hook(lambda _: function())
        on_gpu.backward()


# Fake process groups (``torch.testing._internal``, in torch 2.11 to 2.15): any rank of any size, no communication.


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Make this process rank ``rank`` of a fake default group of ``world`` ranks, and undo it after.

    Raises :class:`CaptureError` if a default process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise CaptureError(
            "a default process group is up in this process, where tracing needs a fake one of its own; "
            "destroy it (torch.distributed.destroy_process_group) before the plan runs"
        )
    # Unwrapped, since the wrapper of a fake group would talk to ranks that do not exist.
    hook, level = sys.excepthook, leave_groups_unwrapped()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    sys.excepthook = hook  # torch's writes the fake rank before each line of a traceback, for as long as the process lives
    try:
        yield
    finally:
        forget_meshes()
        dist.destroy_process_group()
        put_back(level)


@contextmanager
def named_groups(groups: Mapping[str, Sequence[Sequence[int]]], rank: int) -> Iterator[None]:
    """Fake groups of these ranks under these names, as ``rank`` of a fake world, for as long as the block runs."""
    names: list[str] = []
    # Groups along one dimension of a mesh share a name; this rank registers the one that it is in.
    for name, lists in sorted(groups.items()):
        for ranks in lists:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                c10d._register_process_group(cast(Any, name), group)
                names.append(name)
    try:
        yield
    finally:
        for name in names:
            c10d._unregister_process_group(cast(Any, name))


_kept: list[torch.library.Library] = []


def gather_one_by_one() -> None:
    """Have each functional all-gather of this process over gloo run as a single all-gather, not as a coalesced one; idempotent.

    torch 2.13 runs them as coalesced ones (ProcessGroupGloo::allgather_coalesced). A process that has several of those in
    flight at once now and then writes to memory that was freed: it dies by SIGABRT ("unaligned tcache chunk detected") or
    SIGSEGV after some thousands of them, on two ranks and without anything of ours (compare pytorch issue 65231). A single
    all-gather gives the same bytes.
    """
    if _kept:
        return
    library = torch.library.Library("c10d", "IMPL")
    gather = torch.ops.c10d._allgather_base_.default

    def each(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any, async_op: bool = True) -> Any:
        if len(outputs) != 1:
            raise BenchmarkError("an all-gather of several tensors at once cannot be timed over gloo; use nccl")
        _, work = gather(outputs[0], inputs[0], group, async_op)
        return work

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own is overridden, which is what is wanted
        library.impl("allgather_into_tensor_coalesced_", each, "CPU", allow_override=True)
    _kept.append(library)


# Process groups by the name that a graph holds (``torch._C._distributed_c10d``, in torch 2.11 to 2.15).
#
# Groups that we make have names of our choice, so that a graph means the same on every rank: torch's are numbers, which depend
# on the order in which groups were made. A twin is a group of the same ranks as another one, for collectives that are not to
# queue behind the other group's; its name says whose twin it is.


_TWIN = ":gather"
DEFAULT = "0"
"""Name of the default group, under every back end."""
_made: Counter[tuple[int, str]] = Counter()
"""How often (rank, group) was made in this process: the store still has the addresses of groups that are gone."""


def group_ranks(name: str) -> tuple[int, ...]:
    """Global ranks of the process group called ``name``, ascending. Raises KeyError if this process has no such group.

    A twin has the ranks of its group, made or not.
    """
    return tuple(sorted(dist.get_process_group_ranks(group_called(untwinned(name)))))


def group_name(group: object) -> str:
    """Name under which functional collectives find ``group``."""
    return str(group.group_name)  # type: ignore[attr-defined]  # torch declares it nowhere


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
    make_group(twin_name(name), dist.get_process_group_ranks(group_called(untwinned(name))), like=untwinned(name))


def default_store() -> Store | None:
    """The store that all ranks of the default group share; None where there is no group, or only one that is pretended."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return distributed_c10d._get_default_store()


def make_group(name: str, ranks: Sequence[int], like: str = "") -> None:
    """Make the group ``name`` of the global ``ranks``, unless there is one; all of them must ask, in one order of groups.

    It has the back end of the group ``like``, or of the default one.
    """
    if name in distributed_c10d._world.pg_names.values():
        return
    members, rank = list(ranks), dist.get_rank()
    back_end = dist.get_backend(group_called(like) if like else dist.group.WORLD)
    _made[rank, name] += 1
    # Groups along one dimension have one name on different ranks: in the store the first rank tells them apart.
    store = PrefixStore(f"{name} {members[0]} {_made[rank, name]}", distributed_c10d._get_default_store())
    # As torch's ``new_group`` does it, which does not let one choose the name. Members alone take part: no other rank is asked.
    made, _ = distributed_c10d._new_process_group_helper(
        len(members), members.index(rank), members, back_end, store, cast(Any, name), timeout=default_pg_timeout
    )
    distributed_c10d._world.pg_group_ranks[made] = {member: index for index, member in enumerate(members)}
    if back_end == "nccl":
        connect(made)


def connect(group: Any) -> None:
    """Connect the members of the NCCL group ``group`` now, not in their first collective; all of them must call it."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    group._get_backend(gpu).eager_connect_single_device(gpu)


def group_alone() -> Any:
    """A process group of this process alone."""
    make_group("alone", (dist.get_rank(),))
    return group_called("alone")


def destroy_subgroups() -> None:
    """End every process group of this process but the default one, with its threads and sockets; no other rank is asked."""
    forget_meshes()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def group_called(name: str) -> Any:
    """The process group called ``name``. Raises KeyError if this process has no such group."""
    try:
        return _resolve_process_group(cast(Any, name))
    except (RuntimeError, ValueError) as error:
        raise KeyError(name) from error
