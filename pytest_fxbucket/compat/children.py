"""Children of a module by their names, to read and to exchange (``Module._modules``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Every child of ``module`` by its name, one that is held twice too."""
    return module._modules


@contextmanager
def with_children(module: nn.Module, children: Mapping[str, nn.Module | None]) -> Iterator[None]:
    """In the block ``module`` has ``children`` and no others."""
    before = module._modules
    module._modules = dict(children)
    try:
        yield
    finally:
        module._modules = before
