"""What to try after a failure of ranks, a sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.ranks.failure import RankState

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|MemoryError|cannot allocate", re.I)


def lines(kind: str, first: RankState | None, has_processes: bool) -> Iterator[str]:
    """Sentences for a failure of `kind` whose first rank is `first`; `has_processes`: each rank was one."""
    if kind in ("mismatch", "deadlock"):
        yield "make every rank launch the same collectives in the same order (in a plan's graphs the check `collectives` looks)"
    elif kind == "timeout":
        yield from _late(first)
    elif kind == "unpicklable":
        yield "give and return tensors, numbers, strings, and plain containers of them"
    elif kind == "garbled":
        yield "look for code that writes to descriptors that it did not open, or for a forked process that goes on as the rank"
    elif first is not None:
        yield from _ended(first, has_processes)


def _late(first: RankState | None) -> Iterator[str]:
    if first is not None and first.process == "T":
        yield "continue or kill what stopped the rank (SIGSTOP, a debugger)"
    elif first is not None and first.outcome == "running" and first.process == "R":
        yield "see below where the rank is busy; if that is honest work on a slow machine, give it more time (timeout_s)"
    else:
        yield "see below where each rank stands; the one that is not in the others' collective is the one to look at"


def _ended(first: RankState, has_processes: bool) -> Iterator[str]:
    if first.is_out_of_memory or _NO_MEMORY.search(f"{first.error_type} {first.error}"):
        yield "use fewer ranks or a smaller model here (run.world of a plan), or a machine with more memory"
    elif first.outcome == "died" and first.status == -9:
        yield "look who sends SIGKILL: if nobody does, the kernel does when memory runs out (dmesg says so)"
    elif first.outcome == "died" and first.status is not None and first.status < 0:
        yield "see below the Python stack at the crash; a native debugger on the same job with one rank shows the rest"
    elif first.outcome == "died":
        yield "look for os._exit or a library that ends the process; what the rank printed last is below"
    elif first.outcome == "gone":
        yield "look at that machine: its pytest ended, was killed, or lost the network"
    elif has_processes and first.error_type != "AssertionError":
        yield "run the same with backend local: all ranks in one process, one at a time, and nothing that can hang"
