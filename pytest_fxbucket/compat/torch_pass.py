"""torch's own manual pass (``torch._inductor.fx_passes.overlap_manual_scheduling``, in torch 2.11 to 2.15), on any install.

The pass estimates a roofline and then discards it. The estimate imports triton, which a CPU install lacks, so it is replaced by
0.0 while the pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

from pytest_fxbucket.compat.tracing import quiet

if TYPE_CHECKING:
    import torch
    from torch import fx

OPERATORS = "torch._inductor.fx_passes.bucketing"
"""Module that registers the operators which the pass puts into graphs."""


def torch_manual_overlap_bucketing(
    gm: fx.GraphModule, module_bucket_plans: Sequence[str | list[str]], bucket_mode: str | None = None
) -> fx.GraphModule:
    """torch's ``manual_overlap_bucketing(gm, module_bucket_plans, bucket_mode=bucket_mode)``."""
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    estimate = "torch.utils._runtime_estimation.get_{}_time"
    with (
        quiet("torch.__trace"),  # its own structured trace, thousands of empty lines of it
        mock.patch(estimate.format("transfer"), return_value=0.0),
        mock.patch(estimate.format("compute"), return_value=0.0),  # torch 2.12's asks for a GPU
    ):
        # Left out if it is None: torch 2.11 has a single mode.
        mode: Any = {} if bucket_mode is None else {"bucket_mode": bucket_mode}
        passed: fx.GraphModule = manual_overlap_bucketing(gm, list(module_bucket_plans), **mode)
    return passed


@cache
def numbered_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that ``bucketing::_pre_bucket_all_gather`` takes as numbers: torch's, by the names of its attributes."""
    import torch

    values = (getattr(torch, name) for name in dir(torch))
    return tuple(value for value in values if isinstance(value, torch.dtype))
