"""What processes hold, as the kernel says: memory, descriptors, threads, mappings, children."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Holding:
    """Of one process: anonymous memory in KiB (shared with the one it was forked from or not), and counts."""

    memory_kib: int
    descriptors: int
    threads: int
    mappings: int

    def since(self, earlier: Holding) -> Holding:
        """How much each moved."""
        return Holding(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))

    def __str__(self) -> str:
        said = f"memory {self.memory_kib:+,} KiB, descriptors {self.descriptors:+}"
        return f"{said}, threads {self.threads:+}, mappings {self.mappings:+}"


def holding(pid: int) -> Holding:
    """What process `pid` holds now."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Holding(
        int(status["RssAnon"].split()[0]),
        len(list((folder / "fd").iterdir())),
        int(status["Threads"]),
        len((folder / "maps").read_text().splitlines()),
    )


def cpu_ticks(pid: int) -> int:
    """Clock ticks that process `pid` has computed so far."""
    fields_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields_[11]) + int(fields_[12])


def descendants(pid: int) -> list[int]:
    """Processes that came from `pid`, theirs included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return sorted(found[1:])


def everybody() -> dict[int, Holding]:
    """What this process and all that came from it hold."""
    gc.collect()
    return {pid: holding(pid) for pid in (os.getpid(), *descendants(os.getpid()))}
