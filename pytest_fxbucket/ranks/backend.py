"""Which back ends there are, what each needs of the machine, and which one ``auto`` means on it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BACKENDS = ("gloo", "gloo:cuda", "nccl", "local", "fake")
"""gloo: processes, sums in rank order. gloo:cuda: the same with tensors on GPUs, which ranks share. nccl: a GPU for each rank.
local: all ranks in one process. fake: no values."""
CHOICES = ("auto", *BACKENDS)
PLAIN = "gloo:plain"
"""For timing: gloo as it is, which reduces in an order of its own and on threads of its own; no choice of a plan."""
ON_GPUS = frozenset({"gloo:cuda", "nccl"})
IN_ONE_PROCESS = frozenset({"local", "fake"})

_SMI_LIMIT_S = 30.0
_UUID = re.compile(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)")
_device = "cpu"


@dataclass(frozen=True, slots=True)
class Machine:
    """What back ends ask of a machine: UUIDs of the GPUs that may be used, and what this torch was built with."""

    gpus: tuple[str, ...] = ()
    has_cuda: bool = False
    has_nccl: bool = False


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The back end to run on, None if the one that was asked for cannot run here.

    ``lacking`` is one clause that says what kept it, or kept ``auto``, from GPUs; "" if nothing did.
    """

    backend: str | None
    lacking: str = ""


def choose(asked: str, world: int, machine: Machine) -> BackendChoice:
    """What ``asked``, one of CHOICES, means for ``world`` ranks on ``machine``: auto is nccl where that can be, else gloo."""
    if asked != "auto":
        lacking = _lacking(asked, world, machine)
        return BackendChoice(None if lacking else asked, lacking)
    lacking = _lacking("nccl", world, machine)
    return BackendChoice("gloo" if lacking else "nccl", lacking)


def gpus_needed(backend: str, world: int) -> int:
    """How many GPUs ``world`` ranks cannot do without."""
    return {"nccl": world, "gloo:cuda": 1}.get(backend, 0)


def gpus_to_lease(backend: str, world: int, there: int) -> int:
    """How many of the GPUs ``there`` the ranks are spread over."""
    return min(world, there) if backend == "gloo:cuda" else gpus_needed(backend, world)


def spread(leased: Sequence[str], world: int) -> tuple[str, ...]:
    """The GPU of each rank, in turn; a rank has none ("") where none are leased."""
    return tuple(leased[rank % len(leased)] if leased else "" for rank in range(world))


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine as it is. Imports torch, and leaves CUDA alone."""
    import torch
    import torch.distributed as dist

    return Machine(gpus(environ), torch.version.cuda is not None, dist.is_available() and dist.is_nccl_available())


def gpus(environ: Mapping[str, str] = os.environ, source: Callable[[], str] | None = None) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; without it all, in nvidia-smi's (PCI) order.

    ``source`` gives the text of ``nvidia-smi -L``. Neither imports torch nor starts CUDA, after which no process could be
    forked.
    """
    text = (source or nvidia_smi)()
    return _visible(_UUID.findall(text), environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def nvidia_smi() -> str:
    """What ``nvidia-smi -L`` prints; "" where there is no such program, or no driver."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def device() -> str:
    """Where this rank's tensors belong: "cpu", or "cuda:0", which is the rank's own GPU, the only one it sees."""
    return _device


def use_device(name: str) -> None:
    """Say so, once in a rank's process."""
    global _device
    _device = name


def _lacking(backend: str, world: int, machine: Machine) -> str:
    needed = gpus_needed(backend, world)
    if len(machine.gpus) < needed:
        return f"{backend} needs {needed} GPU{'s' * (needed > 1)}, this machine has {len(machine.gpus)}"
    if needed and not machine.has_cuda:
        return f"{backend} needs a torch that was built with CUDA"
    if backend == "nccl" and not machine.has_nccl:
        return "nccl needs a torch that was built with NCCL"
    return ""


def _visible(there: Sequence[str], said: str | None) -> tuple[str, ...]:
    """Those of ``there`` that CUDA_VISIBLE_DEVICES says, each by its index or the beginning of its UUID."""
    whole = [uuid for uuid in there if uuid.startswith("GPU-")]
    if said is None:
        return tuple(whole)
    found: list[str] = []
    for word in (part.strip() for part in said.split(",")):
        index = int(word) if word.isdigit() else len(whole)
        matches = whole[index : index + 1] or [uuid for uuid in there if word and uuid.startswith(word)]
        if len(matches) != 1:
            break  # as CUDA, which uses none from the first that it does not know
        found += matches
    return tuple(found) if len(set(found)) == len(found) else ()
