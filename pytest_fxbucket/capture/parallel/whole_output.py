"""Is a model's output whole under tensor parallelism? A part of it that reaches the loss makes another loss on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError

Shapes = list[tuple[str, tuple[int, ...]]]


def shapes_of(output: Any) -> Shapes:
    """Path and shape of each tensor of ``output``."""
    leaves = pytree.tree_flatten_with_path(output)[0]
    return [(pytree.keystr(path), tuple(leaf.shape)) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def refuse_parts(whole: Shapes, output: Any, colwise: Sequence[str], ranks: int) -> None:
    """Raise :class:`CaptureError` if ``output`` has other shapes than ``whole``, those of the model that is not parted.

    ``colwise`` are the linears whose outputs are a rank's part.
    """
    for (path, expected), (_, shape) in zip(whole, shapes_of(output), strict=False):
        if shape != expected:
            named = f"{colwise[-1]}, colwise in tp_plan," if colwise else "a module of tp_plan"
            what = f"output {path}" if path else "output"
            raise CaptureError(
                f"under tp = {ranks} the model's {what} has the shape {shape}, and {expected} without: a rank's part reaches "
                f"the loss; let what reads the output of {named} be rowwise, or leave it out of tp_plan"
            )
