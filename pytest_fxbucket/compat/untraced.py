"""Work on fake tensors amid a trace, unseen by it: ``torch.utils._python_dispatch``, in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode


@contextmanager
def untraced(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Inside, ``fake_mode`` alone is on, and hooks on saved tensors (of checkpointing, say) do not hear of any."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        fake_mode,
    ):
        yield
