"""Fake tensors, shapes and dtypes without memory: ``torch._subclasses``, in torch 2.11 to 2.14."""

from __future__ import annotations

from torch._subclasses import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode"]
