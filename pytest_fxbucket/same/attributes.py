"""What a graph's attributes hold, by its bytes: a pass may call them what it likes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph.portable import digest, encode_module, raw_bytes


def attribute(root: torch.nn.Module, name: str) -> Any:
    """What ``root`` has by the name ``name``."""
    found: Any = root
    for part in name.split("."):
        found = getattr(found, part)
    return found


def digest_of(root: torch.nn.Module, name: str) -> str:
    """Hex digest of what ``root`` has by the name ``name``: a tensor, or a graph; of all else its name."""
    held = attribute(root, name)
    if isinstance(held, fx.GraphModule):
        return f"graph {digest(encode_module(held))}"
    if not isinstance(held, torch.Tensor):
        return f"{type(held).__qualname__} {name}"
    form = repr((held.dtype, tuple(held.shape), held.stride(), held.device.type))
    try:
        return hashlib.sha256(form.encode() + raw_bytes(held)).hexdigest()
    except (NotImplementedError, RuntimeError):  # a fake one has no bytes
        return f"{form} {name}"
