"""Passes of somebody else for ``fxbucket show`` and ``fxbucket diff``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import fx

from pytest_fxbucket.passes import manual_overlap_bucketing


def not_on_rank_3(gm: fx.GraphModule, module_bucket_plans: Any) -> fx.GraphModule:
    """Wrongly makes another graph on one rank."""
    return gm if dist.get_rank() == 3 else manual_overlap_bucketing(gm, module_bucket_plans)
