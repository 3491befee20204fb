"""The clocks of a rank: what one step took, on the CPU and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(step: Callable[[], None], device: str) -> float:
    """Seconds that ``step`` took on this rank: by the monotonic clock; on a GPU between two events of its current stream."""
    if torch.device(device).type != "cuda":
        begin = time.perf_counter_ns()
        step()
        return (time.perf_counter_ns() - begin) / 1e9
    before, after = _event(), _event()
    torch.cuda.synchronize()
    before.record()
    step()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types
