"""Does an optimizer update each element for itself? One that looks at a whole parameter cannot be given a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.ops import operator_name

if TYPE_CHECKING:
    from torch import fx

_MIXING = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "mm",
            "bmm",
            "addmm",
            "matmul",
            "dot",
            "mv",
            "outer",
            "linalg_vector_norm",
            "linalg_matrix_norm",
            "norm",
            "sum",
            "mean",
        ),
        *("amax", "amin", "max", "min", "prod", "std", "var", "topk", "sort", "median", "_foreach_norm", "_foreach_max"),
        *("_linalg_svd", "linalg_qr", "cumsum", "logsumexp", "_softmax"),
    )
)
"""Operators whose results mix elements of a tensor."""


def refuse_looking_at_all(nodes: Iterable[fx.Node], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise :class:`CaptureError` if one of ``nodes``, the steps of ``optimizers``, mixes elements of a tensor."""
    for node in nodes:
        value = next((source.meta.get("val") for source in node.all_input_nodes), None)
        if operator_name(node) in _MIXING and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            names = " or ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
            what = operator_name(node).replace("::", ".")
            raise CaptureError(
                f"the optimizer {names} looks at more than one element at a time ({what}), and is given a rank's part of each "
                'parameter, so it would make another step than on whole ones; use it with mode = "replicate", or take one that '
                "updates each element for itself, such as AdamW"
            )
