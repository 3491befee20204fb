"""The GPUs of this machine, what its torch was built with, and where a rank's own tensors belong."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from pytest_fxbucket.backends import Machine

_SMI_LIMIT_S = 30.0
_UUID = re.compile(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)")
_device = "cpu"


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
