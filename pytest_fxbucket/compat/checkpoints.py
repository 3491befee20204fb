"""Selective checkpoints while a step is traced (``torch.utils.checkpoint._VersionWrapper``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def caches_unversioned() -> Iterator[None]:
    """While inside, what a selective checkpoint keeps may be of another version, since tracing counts versions on.

    What it leaves for the nodes of later graphs of the process is taken back.
    """
    from torch.fx import traceback
    from torch.utils import checkpoint

    before = dict(traceback.current_meta)
    try:
        with patch.object(checkpoint._VersionWrapper, "get_val", lambda kept, _: _value(kept)):
            yield
    finally:
        traceback.current_meta.clear()
        traceback.current_meta.update(before)


def _value(kept: Any) -> Any:
    return kept.val
