"""The most memory that a rank's process held while something ran."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from pathlib import Path

import torch

_RESET_PEAK = "5"
"""To /proc/self/clear_refs: https://docs.kernel.org/filesystems/proc.html"""


def peak_bytes_of(step: Callable[[], None], device: str) -> int:
    """Largest resident size of this process during ``step``; on a GPU, the most memory of it that tensors took.

    Where the kernel does not reset its peak, the largest since the process began.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    step()
    return _high_water_bytes()


def _high_water_bytes() -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
