"""What kind of machine this is: two runs are compared only on the same kind."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_fxbucket.ranks.backend import nvidia_smi

_GPU = re.compile(r"^GPU \d+: (.+?) \(UUID", re.MULTILINE)
_MODEL = re.compile(r"^(?:model name|Model|Hardware|cpu)\s*:\s*(.+)$", re.MULTILINE)


def machine_kind(cpuinfo: Path = Path("/proc/cpuinfo"), source: Callable[[], str] = nvidia_smi) -> dict[str, Any]:
    """System, architecture, model of the CPU, cores that this process may use, names of all GPUs; nothing that names a host.

    `source` gives the text of `nvidia-smi -L`.
    """
    return {
        "system": platform.system(),
        "arch": platform.machine(),
        "cpu": _cpu(cpuinfo),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _GPU.findall(source()),
    }


def _cpu(cpuinfo: Path) -> str:
    """The model's name with single spaces; that of the architecture where /proc/cpuinfo has none, as on some ARM."""
    try:
        found = _MODEL.search(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.processor() or platform.machine()
