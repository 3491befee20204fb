"""Collectives of process groups that keep no ledger themselves, as NCCL's: noticed by the operators that launch them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.compat.c10d import group_ranks
from pytest_fxbucket.compat.fake_tensors import FakeTensor, TorchDispatchMode
from pytest_fxbucket.ranks import flight_recorder

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
    "recv": "receive",
}
# Members may give these different sizes.
_MAY_DIFFER = frozenset({"all_to_all", "gather", "scatter"})


class Entered(TorchDispatchMode):  # type: ignore[no-untyped-call]  # __init_subclass__
    """While it is on, each launch of this process is entered in the ledger of global rank ``rank``.

    Waits are not: on GPUs they do not hold up the process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        if kind is None or not members or any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in sent):
            return
        compared = kind not in _MAY_DIFFER and word != "allgather"  # the one with a list of outputs
        if kind in ("send", "receive"):
            peer = members[given["dst" if kind == "send" else "src"]]
            # Two members do not do the same here, so each keeps these in a group of its own.
            kind, members = f"{kind} {'to' if kind == 'send' else 'from'} rank {peer}", (self._rank,)
        if members not in self._handles:
            self._handles[members] = flight_recorder.group(members)
        dtype = str(sent[0].dtype).removeprefix("torch.") if sent else ""
        reduction = _reduction(given.get("reduce_op"))
        numel = sum(tensor.numel() for tensor in sent)
        flight_recorder.launch(self._handles[members], f"{kind}{reduction}", dtype, numel, compared=compared)


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
    """The tensors that this rank gives, where there are others for what it gets."""
    name = next((name for name in given if name.startswith("input")), None) or next(iter(given), None)
    return list(_tensors(given[name])) if name is not None else []


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
