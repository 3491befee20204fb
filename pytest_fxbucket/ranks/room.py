"""How many rank processes may live side by side on this machine, and how many threads each may have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# What an idle rank holds of its own beyond what it shares with the fork server, and what a small plan's rank takes at work.
_BYTES_PER_RANK = 256 << 20
_PER_CORE = 8
_ALWAYS = 4


def threads_per_rank(world: int, environ: Mapping[str, str], cores: int | None = None) -> int:
    """Threads for each of `world` ranks such that those of all xdist workers together fit the cores; at least 1."""
    return max(1, _cores(cores) // (world * workers(environ)))


def most_processes(environ: Mapping[str, str], cores: int | None = None, available_bytes: int | None = None) -> int:
    """Rank processes that one pytest process keeps: its share of 8 a core, and of what half of the free memory holds."""
    memory = available_memory() if available_bytes is None else available_bytes
    fit = min(_PER_CORE * _cores(cores), memory // 2 // _BYTES_PER_RANK)
    return max(_ALWAYS, fit // workers(environ))


def workers(environ: Mapping[str, str]) -> int:
    """Workers of pytest-xdist that share this machine; 1 without xdist."""
    text = environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return max(1, int(text)) if text.isdigit() else 1


def available_memory() -> int:
    """Bytes that new processes may take: what the machine has free, and no more than the control group allows."""
    free = _number(Path("/proc/meminfo"), "MemAvailable:") * 1024 or 1 << 62
    limit, used = _number(Path("/sys/fs/cgroup/memory.max")), _number(Path("/sys/fs/cgroup/memory.current"))
    return min(free, max(0, limit - used)) if limit else free


def oom_kills() -> int:
    """Processes of this control group that the kernel ended for lack of memory so far; 0 where it does not say."""
    return _number(Path("/sys/fs/cgroup/memory.events"), "oom_kill ")


def _number(path: Path, key: str = "") -> int:
    try:
        text = path.read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(key):
            word = line[len(key) :].split()[0] if line[len(key) :].split() else ""
            return int(word) if word.isdigit() else 0
    return 0


def _cores(cores: int | None) -> int:
    return cores if cores is not None else len(os.sched_getaffinity(0))
