"""Fake process groups (``torch.testing._internal``, in torch 2.11 to 2.15): any rank of any size, no communication."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_fxbucket.compat import debug_level
from pytest_fxbucket.errors import CaptureError


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Make this process rank ``rank`` of a fake default group of ``world`` ranks, and undo it after.

    Raises :class:`CaptureError` if a default process group exists already.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise CaptureError(
            "a default process group is up in this process, where tracing needs a fake one of its own; "
            "destroy it (torch.distributed.destroy_process_group) before the plan runs"
        )
    hook, level = sys.excepthook, debug_level.leave_groups_unwrapped()  # what wraps a fake group finds nobody to talk to
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    sys.excepthook = hook  # torch's writes the fake rank before each line of a traceback, for as long as the process lives
    try:
        yield
    finally:
        dist.destroy_process_group()
        debug_level.put_back(level)
