"""Back ends of ranks: what each is and needs, who makes its process groups or plays its ranks, and which one ``auto`` means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.words import counted

MAX_RANKS = 64
"""Processes of one pool, or ranks of one process that have outputs of their own: 250 descriptors go with one message."""
PLACES = 16
"""Places for ranks on one GPU, of which a run leases as many as it needs."""
# The version of NCCL from which each kind of collective can have an algorithm of its own.
_CHOOSING_NCCL = (2, 24)
# The version of NCCL from which ranks can share a GPU.
_SHARING_NCCL = (2, 30)


@dataclass(frozen=True, slots=True)
class Machine:
    """What back ends ask of a machine: UUIDs of the GPUs that may be used, and what this torch was built with."""

    gpus: tuple[str, ...] = ()
    has_cuda: bool = False
    nccl: tuple[int, ...] | None = None
    """Version of the NCCL library that is loaded, which need not be that of the package; None: this torch has none."""
    exclusive: tuple[str, ...] = ()
    """Those of ``gpus`` that take one process at a time."""
    left_out: str = ""
    """A clause that says why GPUs which are there may not be used; "" if all may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One back end."""

    name: str
    join: str = ""
    """``module:function(store, rank, world, timeout)`` that makes the default process group of a rank's own process."""
    play: str = ""
    """The job (``module:function``) that plays all ranks in one process; such a back end joins no group."""
    gpus: Literal["", "shared", "each"] = ""
    """GPUs that its ranks share, or one for each, which they can share where NCCL lets them."""
    most_ranks: int = MAX_RANKS
    has_values: bool = True
    """Whether its collectives move data."""
    timed_on: str = ""
    """The back end that step time is measured on in its place; empty: it has no step time."""
    has_own_sums: bool = False
    """Whether it adds in an order of its own, whatever order a job asks for."""
    is_watched: bool = False
    """Whether a dispatch mode enters launches in a rank's flight record, since its process groups enter nothing."""

    def most_on_gpu(self, machine: Machine, ranks_per_gpu: int = 0) -> int:
        """How many ranks may share a GPU of ``machine``; ``ranks_per_gpu``: how many shall at most, 0: as many as must."""
        if machine.exclusive:
            return 1
        if self.gpus == "each":
            return (ranks_per_gpu or PLACES) if (machine.nccl or (0,)) >= _SHARING_NCCL else 1
        return ranks_per_gpu or MAX_RANKS

    def gpus_to_lease(self, world: int, machine: Machine, ranks_per_gpu: int = 0) -> int:
        """How many GPUs ``world`` ranks are spread over, one for each where there are as many; 0: they need none."""
        if not self.gpus:
            return 0
        needed = -(-world // self.most_on_gpu(machine, ranks_per_gpu))
        return needed if ranks_per_gpu else max(needed, min(world, len(machine.gpus)))

    def places_to_lease(self, ranks_on_gpu: int, ranks_per_gpu: int = 0) -> int:
        """How many of a GPU's PLACES its ranks lease: one each, but all for NCCL, or their part if ``ranks_per_gpu`` is set."""
        if self.gpus == "each":
            return -(-PLACES * ranks_on_gpu // sharers(ranks_on_gpu, ranks_per_gpu))
        return min(ranks_on_gpu, PLACES)

    def lacking(self, world: int, machine: Machine, ranks_per_gpu: int = 0) -> str:
        """One clause that says why ``world`` ranks cannot run on ``machine``; "" if they can."""
        needed, there = self.gpus_to_lease(world, machine, ranks_per_gpu), len(machine.gpus)
        # Only where GPUs are there: else these are what is lacking, whatever torch was built with.
        if needed and there and not machine.has_cuda:
            return f"{self.name} needs a torch that was built with CUDA"
        if self.name == "nccl" and there and machine.nccl is None:
            return "nccl needs a torch that was built with NCCL"
        if self.name == "nccl" and there and (machine.nccl or ()) < _CHOOSING_NCCL:
            return f"nccl needs NCCL 2.24 or newer, the one that is loaded is {'.'.join(map(str, machine.nccl or ()))}"
        if there >= needed:
            return ""
        why = self._why_not_fewer(world, machine, ranks_per_gpu) if there else ""
        left_out = f"; {machine.left_out}" if machine.left_out else ""
        return f"{self.name} needs {counted(needed, 'GPU')}, this machine has {there}{why}{left_out}"

    def _why_not_fewer(self, world: int, machine: Machine, ranks_per_gpu: int) -> str:
        """Why ranks do not share the GPUs that there are."""
        if machine.exclusive:
            return (
                f"; {machine.exclusive[0]} takes one process at a time (nvidia-smi --compute-mode=DEFAULT lets ranks share it)"
            )
        most = self.most_on_gpu(machine, ranks_per_gpu)
        # The same machine with an NCCL that lets ranks share, to see whether that would be enough.
        newer = replace(machine, nccl=_SHARING_NCCL)
        if most < (shared := self.most_on_gpu(newer, ranks_per_gpu)):
            version = ".".join(map(str, machine.nccl or ()))
            if self.gpus_to_lease(world, newer, ranks_per_gpu) > len(machine.gpus):
                return f"; NCCL {version} gives each rank its own, and from 2.30 on {shared} ranks share one at most"
            return (
                f"; NCCL {version} gives each rank its own, from 2.30 on ranks share: install nvidia-nccl-cu12 or -cu13, "
                "and name its libnccl.so.2 in LD_PRELOAD"
            )
        return f" for {counted(most, 'rank')} each" + (" ([run] ranks_per_gpu)" if most == ranks_per_gpu else "")


def sharers(ranks_on_gpu: int, ranks_per_gpu: int = 0) -> int:
    """Among how many ranks a GPU is divided: the run's own, or as many as its plan allows, of other runs too."""
    return max(ranks_on_gpu, ranks_per_gpu)


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
    ranks_on_gpu: int = 0
    """Most ranks on any GPU; 0: on none."""

    @property
    def shares(self) -> str:
        """A clause for people if ranks share a GPU; "" if they do not."""
        return f"{self.ranks_on_gpu} ranks on a GPU" if self.ranks_on_gpu > 1 else ""

    def unless_required(self, name: str, *, require_gpus: bool) -> BackendChoice:
        """The same; if something kept it from GPUs that are required, raises RankError, which calls the plan ``name``."""
        if self.lacking and require_gpus:
            raise RankError(f"{name}: {self.lacking}; --fxbucket-require-gpus makes that an error")
        return self

    def for_timing(self) -> BackendChoice:
        """The same, where step time can be measured: not by ranks that share a GPU."""
        if not self.shares:
            return self
        why = f"{self.backend} puts {self.shares}, where kernels take turns, which says nothing of step time"
        return BackendChoice(None, f"{why}; use a GPU for each rank, or gloo")


def choose(asked: str, world: int, machine: Machine, ranks_per_gpu: int = 0) -> BackendChoice:
    """What ``asked``, one of CHOICES, means for ``world`` ranks on ``machine``: auto is nccl where that can be, else gloo.

    ``ranks_per_gpu``: how many may share a GPU; 0: as many as they must.
    """
    wanted, otherwise = ("nccl", "gloo") if asked == "auto" else (asked, None)
    row = backend_named(wanted)
    if lacking := row.lacking(world, machine, ranks_per_gpu):
        return BackendChoice(otherwise, lacking)
    gpus = row.gpus_to_lease(world, machine, ranks_per_gpu)
    return BackendChoice(wanted, ranks_on_gpu=-(-world // gpus) if gpus else 0)
