"""Fake tensors, shapes and dtypes without memory: ``torch._subclasses``, in torch 2.11 to 2.15."""

from __future__ import annotations

from torch._subclasses import FakeTensor, FakeTensorMode

from pytest_fxbucket.compat.dispatch import unseen

__all__ = ["FakeTensor", "FakeTensorMode", "fresh_like"]


def fresh_like(fake: FakeTensor) -> FakeTensor:
    """A fake tensor of the same sizes, strides, dtype, device and mode, on a storage of its own; nothing is dispatched."""
    import torch

    with unseen():
        meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return FakeTensor(fake.fake_mode, meta, fake.device)
