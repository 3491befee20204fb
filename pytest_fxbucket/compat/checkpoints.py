"""Selective checkpoints while a step is traced (``torch.utils.checkpoint._VersionWrapper``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def caches_unversioned() -> Iterator[None]:
    """While inside, what a selective checkpoint keeps may be of another version, since tracing counts versions on."""
    from torch.utils import checkpoint

    with patch.object(checkpoint._VersionWrapper, "get_val", lambda kept, _: _value(kept)):
        yield


def _value(kept: Any) -> Any:
    return kept.val
