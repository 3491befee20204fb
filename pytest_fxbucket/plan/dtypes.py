"""dtypes that a plan names; torch is imported when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError

if TYPE_CHECKING:
    import torch


def dtype_named(name: str | None) -> torch.dtype | None:
    """``torch.<name>``; None for None. Raises :class:`PlanError` if torch has no such dtype."""
    import torch

    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"torch has no dtype {name!r}")
    return dtype
