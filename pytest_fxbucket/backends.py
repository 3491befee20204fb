"""Back ends of ranks: what each is and needs, who makes its process groups or plays its ranks, and which one ``auto`` means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_fxbucket.errors import RankError

MAX_RANKS = 64
"""Processes of one pool, or ranks of one process that have outputs of their own: 250 descriptors go with one message."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What back ends ask of a machine: UUIDs of the GPUs that may be used, and what this torch was built with."""

    gpus: tuple[str, ...] = ()
    has_cuda: bool = False
    has_nccl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One back end."""

    name: str
    join: str = ""
    """``module:function(store, rank, world, timeout)`` that makes the default process group of a rank's own process."""
    play: str = ""
    """The job (``module:function``) that plays all ranks in one process; such a back end joins no group."""
    gpus: Literal["", "shared", "each"] = ""
    """GPUs that its ranks share, or one for each."""
    most_ranks: int = MAX_RANKS
    has_values: bool = True
    """Whether its collectives move data."""
    timed_on: str = ""
    """The back end that step time is measured on in its place; empty: it has no step time."""
    has_own_sums: bool = False
    """Whether it adds in an order of its own, and in no other that a job asks for."""
    is_watched: bool = False
    """Whether a rank enters what it launches in its flight record by operators, as its process groups enter nothing."""

    def gpus_needed(self, world: int) -> int:
        """How many GPUs ``world`` ranks cannot do without."""
        return {"": 0, "shared": 1, "each": world}[self.gpus]

    def gpus_to_lease(self, world: int, there: int) -> int:
        """How many of the GPUs ``there`` the ranks are spread over."""
        return min(world, there) if self.gpus == "shared" else self.gpus_needed(world)

    def lacking(self, world: int, machine: Machine) -> str:
        """One clause that says why ``world`` ranks cannot run on ``machine``; "" if they can."""
        needed = self.gpus_needed(world)
        if len(machine.gpus) < needed:
            return f"{self.name} needs {needed} GPU{'s' * (needed > 1)}, this machine has {len(machine.gpus)}"
        if needed and not machine.has_cuda:
            return f"{self.name} needs a torch that was built with CUDA"
        if self.name == "nccl" and not machine.has_nccl:
            return "nccl needs a torch that was built with NCCL"
        return ""


_GROUPS, _SINGLE = "pytest_fxbucket.ranks.process_groups", "pytest_fxbucket.ranks.single_process.play"
_PLAIN = "gloo:plain"
_ROWS = (
    # Processes, sums in rank order.
    Backend(name="gloo", join=f"{_GROUPS}.ordered:join", timed_on=_PLAIN),
    # The same with tensors on GPUs.
    Backend(name="gloo:cuda", join=f"{_GROUPS}.ordered:join", gpus="shared", timed_on="gloo:cuda"),
    Backend(name="nccl", join=f"{_GROUPS}.nccl:join", gpus="each", timed_on="nccl", has_own_sums=True, is_watched=True),
    # Ranks take turns at each wait.
    Backend(name="local", play=f"{_SINGLE}:play_local"),
    # One rank after the other, each by itself.
    Backend(name="fake", play=f"{_SINGLE}:play_fake", most_ranks=1 << 16, has_values=False),
)
# For timing alone, and no choice of a plan: gloo as it is, which reduces in an order and on threads of its own.
_TIMED = Backend(name=_PLAIN, join=f"{_GROUPS}.ordered:join_plain_gloo", timed_on=_PLAIN, has_own_sums=True)
BACKENDS = {row.name: row for row in (*_ROWS, _TIMED)}
"""All by name."""
NAMES = tuple(row.name for row in _ROWS)
CHOICES = ("auto", *NAMES)
"""What a plan, an option or a marker may ask for."""


def backend_named(name: str) -> Backend:
    """The back end of this name. Raises RankError if there is none."""
    if name not in BACKENDS:
        raise RankError(f'no ranks for backend "{name}"; expected one of {", ".join(NAMES)}')
    return BACKENDS[name]


def row_of(asked: str) -> Backend:
    """The back end ``asked``, one of CHOICES; of auto that of gloo, which every machine has. Raises RankError for others."""
    return backend_named("gloo" if asked == "auto" else asked)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The back end to run on, None if the one that was asked for cannot run here.

    ``lacking`` is one clause that says what kept it, or kept ``auto``, from GPUs; "" if nothing did.
    """

    backend: str | None
    lacking: str = ""


def choose(asked: str, world: int, machine: Machine) -> BackendChoice:
    """What ``asked``, one of CHOICES, means for ``world`` ranks on ``machine``: auto is nccl where that can be, else gloo."""
    wanted, otherwise = ("nccl", "gloo") if asked == "auto" else (asked, None)
    lacking = backend_named(wanted).lacking(world, machine)
    return BackendChoice(otherwise if lacking else wanted, lacking)
