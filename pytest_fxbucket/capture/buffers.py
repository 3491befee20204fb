"""Buffers that a forward puts others in the places of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.capture.names import NodeNamer


def refuse_other_buffers(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`CaptureError` for a buffer of ``model`` that has no place among those ``before`` its forward."""
    for fqn, buffer in model.named_buffers():
        was = before.get(fqn)
        if was is None:
            raise CaptureError(f"buffer {fqn} is new in forward, so it is no input of the step; register it in __init__")
        if (buffer.shape, buffer.dtype) != (was.shape, was.dtype):
            raise CaptureError(
                f"buffer {fqn}, {list(was.shape)} in {was.dtype}, is replaced in forward by one of {list(buffer.shape)} in "
                f"{buffer.dtype}; only its values may change, since one graph serves all steps"
            )


def keep_buffers(model: nn.Module, before: Mapping[str, torch.Tensor], namer: NodeNamer) -> None:
    """Write what stands in the place of a buffer into the one ``before``, as the next step reads it. To be called behind
    backward, which may need the old values."""
    for fqn, buffer in list(model.named_buffers()):
        if buffer is before[fqn]:
            continue
        owner, _, name = fqn.rpartition(".")
        with torch.no_grad(), namer.inside(owner):
            before[fqn].copy_(buffer)
        setattr(model.get_submodule(owner), name, before[fqn])
