"""A way around a fault of torch's own gloo back end."""

from __future__ import annotations

from typing import Any

import torch

from pytest_fxbucket.errors import BenchmarkError

_kept: list[torch.library.Library] = []


def gather_one_by_one() -> None:
    """Let this process's functional all-gathers over gloo go to gloo each by itself; idempotent.

    On torch 2.13 they go as coalesced ones (ProcessGroupGloo::allgather_coalesced), and a process that has several of those in
    flight at once now and then writes to memory that was freed: it dies by SIGABRT ("unaligned tcache chunk detected") or
    SIGSEGV after some thousands of them, on two ranks and without anything of ours (compare pytorch issue 65231). The other
    way gives the same bytes.
    """
    if _kept:
        return
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch gives it no types
    gather = torch.ops.c10d._allgather_base_.default

    def each(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any, async_op: bool = True) -> Any:
        if len(outputs) != 1:
            raise BenchmarkError("an all-gather of several tensors at once cannot be timed over gloo; use nccl")
        _, work = gather(outputs[0], inputs[0], group, async_op)
        return work

    library.impl("allgather_into_tensor_coalesced_", each, "CPU", allow_override=True)  # type: ignore[no-untyped-call]  # as above
    _kept.append(library)
