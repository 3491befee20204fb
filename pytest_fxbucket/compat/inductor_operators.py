"""Operators that inductor's decompositions end in (``torch._inductor.inductor_prims``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from importlib import import_module


def register_inductor_operators() -> None:
    """Let ``torch.ops.prims`` have them, such as ``prims::fma``: torch registers them when inductor is imported."""
    import_module("torch._inductor.inductor_prims")
