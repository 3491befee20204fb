"""What models of the zoo are fed, and losses of what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

VOCAB = 96


def tokens(generator: Generator, *shape: int, high: int = VOCAB) -> Tensor:
    """int64 in [3, high): no special token."""
    return torch.randint(3, high, shape, generator=generator)


def labelled(generator: Generator) -> dict[str, Tensor]:
    """input_ids and labels, int64 of shape (2, 12)."""
    ids = tokens(generator, 2, 12)
    return {"input_ids": ids, "labels": ids.clone()}


def classified(generator: Generator) -> dict[str, Tensor]:
    """input_ids (2, 12) and one label of 0, 1 each."""
    return {"input_ids": tokens(generator, 2, 12), "labels": torch.randint(0, 2, (2,), generator=generator)}


def pictures(size: int, count: int = 2) -> Callable[[Generator], tuple[Tensor]]:
    """float32 of shape (count, 3, size, size), positional."""
    return lambda generator: (torch.randn(count, 3, size, size, generator=generator),)


def labelled_pictures(size: int, count: int = 2) -> Callable[[Generator], dict[str, Tensor]]:
    """pixel_values of shape (count, 3, size, size) and labels of 0, 1."""
    return lambda generator: {
        "pixel_values": torch.randn(count, 3, size, size, generator=generator),
        "labels": torch.randint(0, 2, (count,), generator=generator),
    }


def vectors(*shape: int) -> Callable[[Generator], tuple[Tensor]]:
    """float32 of ``shape``, positional."""
    return lambda generator: (torch.randn(*shape, generator=generator),)


def mean_square(output: Any, batch: Any) -> Tensor:
    """Mean square of all floating tensors in ``output``, in float32."""
    from torch.utils import _pytree as pytree

    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()
