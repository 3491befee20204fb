"""Ranks on GPUs: an environment and torch flags under which the same step gives the same bits again; groups over NCCL.

By default NCCL chooses algorithm, protocol and channels by message size, so a bucketed sum adds in another order than separate
ones. On one channel the order depends on nothing but who gets an element, if a reduce-scatter goes round the ring and an
all-reduce up the tree, which is a chain of the ranks. Round the ring an all-reduce begins with another rank in each chunk of
its message, so what a bucket moves to another place has other bits: in sums from three ranks on, in averages with denormals on
two as well, since the share that it begins with is rounded by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.backends import BACKENDS
from pytest_fxbucket.compat import c10d
from pytest_fxbucket.compat.c10d import group_ranks
from pytest_fxbucket.compat.fake_tensors import FakeTensor, TorchDispatchMode
from pytest_fxbucket.ranks import flight_recorder
from pytest_fxbucket.ranks.flight_recorder import FROM_ANY
from pytest_fxbucket.ranks.machine import loaded_nccl
from pytest_fxbucket.ranks.process_groups.base import dtype_of, numel_of

_REPEATABLE = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
}
_ONE_ORDER = {
    "NCCL_ALGO": "Ring;allreduce:Tree",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
}
# One machine: no socket but on loopback, none at all for NCCL's own status service; and no second clock beside the parent's.
_AT_HOME = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


# Ranks that share a GPU wait for each other's kernels, so all of these must fit on it at once: one block of threads for each.
_SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MIN_CTAS": "1",
    "NCCL_MAX_CTAS": "1",
}
_FOR_TENSORS = 0.9
"""Part of a rank's share of its GPU's memory that tensors may take; the rest is for CUDA's context and NCCL's buffers."""


def settings(backend: str, gpu: str = "", sharers: int = 1) -> dict[str, str]:
    """The environment of a rank, to be set before CUDA starts, and kept. Empty off GPUs.

    ``gpu``: UUID of the only GPU that the rank sees; ``sharers``: among how many ranks, also of other runs, it is divided.
    """
    if not BACKENDS[backend].gpus:
        return {}
    ours = {"CUDA_VISIBLE_DEVICES": gpu, **_REPEATABLE}
    if backend != "nccl":
        return ours
    # CUDA_MPS_ACTIVE_THREAD_PERCENTAGE has an effect only under the Multi-Process Service.
    shared = {**_SHARING, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // sharers)} if sharers > 1 else {}
    return {**ours, **_ONE_ORDER, **_AT_HOME, **shared}


def share_memory(sharers: int) -> None:
    """Let this rank's tensors have no more than their share of the GPU: more is an error of this rank, not of another."""
    torch.cuda.set_per_process_memory_fraction(_FOR_TENSORS / sharers)


def apply(backend: str) -> None:
    """Set torch's flags for a job: deterministic or an error, no TF32, no sums in less than float32. None off GPUs."""
    if not BACKENDS[backend].gpus:
        return
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms(True), which imports inductor
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def record(backend: str) -> tuple[str, ...]:
    """What ``settings`` and ``apply`` set, as it is now in this process, and versions behind it: a line ``name=value`` each."""
    if not BACKENDS[backend].gpus:
        return ()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "matmul.allow_tf32": matmul.allow_tf32,
        "matmul.allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "matmul.allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
    }
    if torch.cuda.is_initialized():
        flags["gpu"] = torch.cuda.get_device_name()
    if backend == "nccl" and dist.is_nccl_available():
        flags["nccl"] = ".".join(map(str, loaded_nccl() or ()))
    environ = {name: os.environ.get(name, "not set") for name in settings(backend, sharers=2)}  # also those of ranks that share
    return tuple(f"{name}={value}" for name, value in {"backend": backend, **environ, **flags}.items())


def join(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> None:
    """Make the default process group over NCCL, at once and not at the first collective, on the rank's one GPU.

    Raises RuntimeError for a torch that cannot.
    """
    if torch.version.cuda is None or not dist.is_nccl_available():
        raise RuntimeError("back end nccl needs a torch that was built with CUDA and NCCL")
    c10d.leave_groups_unwrapped()  # these groups are timed, too
    torch.cuda.set_device(0)
    # No device_id: with it torch splits the groups of a job off this one, by a collective of all ranks at the first use of each
    # group, but ranks of different pipeline stages use different groups first.
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timeout)
    c10d.connect(dist.group.WORLD)


# NCCL's groups enter nothing in a rank's flight record: a dispatch mode sees the operators that launch their collectives.


_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
# The beginning of an operator's name without its underscores, longer ones first.
_KINDS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
}
_ROOTED = {"broadcast": "of", "scatter": "of", "gather": "to", "reduce": "to"}
# Members may give these different sizes.
_MAY_DIFFER = frozenset({"all_to_all", "gather", "scatter"})


class WatchedLaunches(TorchDispatchMode):
    """While it is on, each launch of this process is entered in the flight record of global rank ``rank``.

    Waits are not: on GPUs they do not hold up the process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._handles: dict[tuple[int, ...], int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Nothing to see while torch.compile compiles: without this it would not compile at all."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Enter ``func`` if it launches a collective, and call it."""
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace in _NAMESPACES:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            self._enter(name, given)
        return func(*args, **kwargs)

    def _enter(self, name: str, given: dict[str, Any]) -> None:
        word = name.replace("_", "")
        kind = next((kind for beginning, kind in _KINDS.items() if word.startswith(beginning)), None)
        members = _members(given)
        sent = [] if kind == "barrier" else _sent(given)
        # A step that is traced, on fake or meta tensors, launches nothing.
        if kind is None or not members or any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in sent):
            return
        compared = kind not in _MAY_DIFFER and word != "allgather"  # the one with a list of outputs
        if kind in ("send", "receive"):
            # Two members do not do the same here, so each keeps these in a group of its own.
            kind, members = self._with_peer(kind, members, given, sent), (self._rank,)
        if members not in self._handles:
            self._handles[members] = flight_recorder.group(members)
        root = f" {_ROOTED[kind]} {given.get('root_rank', given.get('src'))}" if kind in _ROOTED else ""
        named = f"{kind}{root}{_reduction(given.get('reduce_op'))}"
        flight_recorder.launch(self._handles[members], named, dtype_of(sent), numel_of(sent), compared=compared)

    def _with_peer(self, kind: str, members: tuple[int, ...], given: dict[str, Any], sent: list[torch.Tensor]) -> str:
        """Count a message; its kind with the peer's name."""
        place = given.get("dst" if kind == "send" else "src")
        if place is None:  # of what is received from anybody, which NCCL refuses
            return FROM_ANY
        peer, received = members[place], kind == "receive"
        sender, receiver = (peer, self._rank) if received else (self._rank, peer)
        # NCCL has no tags.
        flight_recorder.message(sender, receiver, 0, dtype_of(sent), numel_of(sent), received=received)
        return f"{kind} {'to' if kind == 'send' else 'from'} rank {peer}"


def _members(given: dict[str, Any]) -> tuple[int, ...]:
    """Global ranks of the group, by the name that functional collectives have, or the object that the others have."""
    name = given.get("group_name")
    if name is None and "process_group" in given:
        group = given["process_group"]
        name = (group if isinstance(group, c10d.ProcessGroup) else c10d.ProcessGroup.unbox(group)).group_name
    try:
        return group_ranks(name) if name is not None else ()
    except KeyError:
        return ()


def _reduction(op: Any) -> str:
    if op is None:
        return ""
    name = op if isinstance(op, str) else c10d.ReduceOp.RedOpType(op.op()).name
    return f"({name.lower()})"


def _sent(given: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that this rank sends: arguments called input, or else the first argument."""
    name = next((name for name in given if name.startswith("input")), None) or next(iter(given), None)
    return list(_tensors(given[name])) if name is not None else []


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
