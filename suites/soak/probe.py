"""A plugin for the runs of the soak: writes what all processes hold after the first items, and after the last.

They hold memory, descriptors, threads and mappings, as the kernel says.
"""

from __future__ import annotations

import gc
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pytest


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


def pytest_addoption(parser):
    group = parser.getgroup("soak")
    group.addoption("--soak-items", type=int, default=10)
    group.addoption("--soak-warm", type=int, default=5, help="items after which the first look is taken")
    group.addoption("--soak-report", type=Path)


QUIET_ITEMS = 3


class Probe:
    def __init__(self, config):
        self._warm, self._report = config.getoption("soak_warm"), config.getoption("soak_report")
        self._done, self._looks = 0, []
        self._quiet, self._ticks = 0, -1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        result = yield
        self._done += 1
        # Groups that a job made end with the next one.
        is_first = not self._looks and self._done >= self._warm and self._is_server_quiet() and "make_groups" not in item.name
        if is_first or self._done == len(item.session.items):
            self._looks.append({pid: asdict(one) for pid, one in everybody().items()})
            self._report.write_text(json.dumps(self._looks))
        return result

    def _is_server_quiet(self):
        """Whether the fork server has imported all that it imports when idle: it computed nothing for a few items."""
        ticks = cpu_ticks(descendants(os.getpid())[0])
        self._quiet = self._quiet + 1 if ticks == self._ticks else 0
        self._ticks = ticks
        return self._quiet >= QUIET_ITEMS


def pytest_configure(config):
    if config.getoption("soak_report"):
        config.pluginmanager.register(Probe(config), "soak-probe")
