"""Modules and functions that torch.compile wraps, run as they are (``torch._dynamo.config``); in torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what torch.compile gave, or compiles itself when it is called."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def uncompiled() -> Iterator[None]:
    """In the block what torch.compile wraps runs as if it did not, under a tracer too."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    import torch

    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), torch.compiler.set_stance("force_eager"):
        yield
