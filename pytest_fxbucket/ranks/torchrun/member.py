"""Which of torchrun's processes this one is, and where it is in the items that all run; needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_fxbucket.errors import UsageError

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of ``world``. ``node`` counts agents of torchrun, one a machine; ``host`` and ``port`` are the store's."""

    rank: int
    world: int
    node: int
    nodes: int
    local_rank: int
    local_world: int
    host: str
    port: int
    serves_store: bool
    """Whether this process is the one that must serve the store, as no agent does."""
    run: str
    """Tells one start of the job from another."""

    @property
    def name(self) -> str:
        """For files: ``node0.rank1``."""
        return f"node{self.node}.rank{self.rank}"


def member_of(environ: Mapping[str, str] = os.environ) -> Member | None:
    """What torchrun said in ``environ``; None where it did not start this process. Raises UsageError if a part is missing."""
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None

    def number(name: str) -> int:
        text = environ.get(name, "")
        if not text.isdigit():
            raise UsageError(
                f"{name} is {text!r} although torchrun started this process; expected a number, as torchrun sets it"
            )
        return int(text)

    rank, agent_serves = number("RANK"), environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Member(
        rank=rank,
        world=number("WORLD_SIZE"),
        node=number("GROUP_RANK"),
        nodes=number("GROUP_WORLD_SIZE"),
        local_rank=number("LOCAL_RANK"),
        local_world=number("LOCAL_WORLD_SIZE"),
        host=environ.get("MASTER_ADDR", ""),
        port=number("MASTER_PORT"),
        serves_store=rank == 0 and not agent_serves,
        run=f"{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def machine() -> tuple[str, str, str]:
    """What tells this machine, its network and its process ids from others: equal where all three are shared."""
    with open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    return boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")


# Names for the moments at which processes meet, whose order as strings tells who is ahead: "!" and "#" come before digits, and
# "~" after them.


HELLO, ITEMS, DIFFERENCES, END = "!hello", "#items", "#items.differences", "~end"
"""Moments before, and after, all that an ItemProgress names."""
LEFT = "~end.left"
"""The moment of a process that will not come to any other, the end included."""


class ItemProgress:
    """Where this process is in the list of items that all run. A later moment has a larger name, as strings go.

    A moment is: item, how often it was begun, phase, reports of the phase so far, 1 for a report or 0 for a run, run.
    """

    def __init__(self) -> None:
        self._item = self._begun = self._phase = self._reports = self._runs = 0

    def next_item(self) -> None:
        """Go on to the next item."""
        self._item += 1
        self._begun = self._phase = self._reports = self._runs = 0

    def enter(self, phase: int) -> None:
        """Go on to a phase of the item: 0 set-up, 1 call, 2 teardown; an earlier one than before begins the item again."""
        # An item that was not begun yet is in phase 0 without a report: its first set-up is no second beginning.
        self._begun += phase <= self._phase and (self._reports > 0 or phase < self._phase)
        self._phase, self._reports, self._runs = phase, 0, 0

    def run(self) -> str:
        """The next job of ranks within this phase."""
        self._runs += 1
        return f"{self._prefix}.0.{self._runs:06d}"

    def report(self) -> str:
        """The next report about this phase."""
        topic = f"{self._prefix}.1"
        self._reports, self._runs = self._reports + 1, 0
        return topic

    @property
    def _prefix(self) -> str:
        # Padded with zeros, so that strings compare as the numbers do.
        return f"{self._item:08d}.{self._begun:03d}.{self._phase}.{self._reports:06d}"
