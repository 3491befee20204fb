"""How torch groups tensors before foreach calls (``torch.utils._foreach_utils``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def grouped(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """``tensors`` by device and dtype, in torch's own order, which is none that one can see."""
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    groups = _group_tensors_by_device_and_dtype([list(tensors)]).values()
    return [[tensor for tensor in lists[0] if tensor is not None] for lists, _ in groups]


@contextmanager
def takes_fake_tensors() -> Iterator[None]:
    """While inside, what asks whether foreach calls can take its tensors decides for fake ones as for real ones."""
    from torch._subclasses import FakeTensor
    from torch.utils._foreach_utils import _foreach_supported_types

    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)
