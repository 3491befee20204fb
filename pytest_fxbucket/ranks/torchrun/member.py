"""Which of the processes that torchrun started this one is, read from its environment; needs no torch."""

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
