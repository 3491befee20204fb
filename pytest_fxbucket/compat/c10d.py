"""Process groups and works from torch's C++ side (torch.distributed gives no public name to what a subclass needs)."""

from __future__ import annotations

# Run on torch 2.13 and 2.15. Work and ProcessGroup may be subclassed in Python; other classes here may not.
from torch._C import _DisableTorchDispatch as without_dispatch_modes
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
)

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
