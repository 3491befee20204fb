"""Operators that inductor's decompositions end in (``torch._inductor.inductor_prims``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from importlib import import_module


def register_inductor_operators() -> None:
    """Register inductor's operators under ``torch.ops.prims``, such as ``prims::fma``: torch does so on import of inductor."""
    import_module("torch._inductor.inductor_prims")
