"""What all jobs of a rank stand on, and no job can be given back once another has taken it away."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence

import torch.distributed as dist

_LIMITS = tuple(sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")))
_STANDARD = (0, 1, 2)


class Footing:
    """Descriptors 0 to 2 and `fds`, the default process group, Python's output, and resource limits, as they are now."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._files = {fd: _file(fd) for fd in (*_STANDARD, *fds)}
        self._group = dist.group.WORLD
        self._limits = [resource.getrlimit(one) for one in _LIMITS]

    def lost(self) -> str:
        """What has changed since, so that the process is of no use to other jobs; "" if nothing has."""
        changed = [str(fd) for fd, file in self._files.items() if _file(fd) != file]
        if changed:
            return f"descriptor {', '.join(changed)} was closed or replaced"
        if dist.group.WORLD is not self._group:
            return "the default process group was destroyed or replaced"
        if not _takes_text():
            return "sys.stdout or sys.stderr was closed"
        if [resource.getrlimit(one) for one in _LIMITS] != self._limits:
            return "a resource limit was changed"
        return ""


def _file(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _takes_text() -> bool:
    try:
        return not (sys.stdout.closed or sys.stderr.closed)
    except ValueError:  # of a stream that was detached
        return False
