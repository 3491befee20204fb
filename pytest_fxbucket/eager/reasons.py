"""Reasons for which torch's own step rounds otherwise than the captured one, by design, and where a model has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from pytest_fxbucket.capture.parallel.forwards import forwards_of
from pytest_fxbucket.capture.units import units_of

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan

WORDS = {
    "reused_unit": (
        "a unit of FSDP2's that is called more than once reduces what earlier microbatches gave it by itself there, "
        "here all is added first"
    ),
    "rowwise_bias": "RowwiseParallel adds a bias to a part of the sum, here it is added to the sum",
    "ddp_buckets": (
        "DistributedDataParallel fills buckets of its own by size, and round a ring a sum depends on its place in the bucket"
    ),
    "fused_rnn": "eager runs oneDNN's recurrent layer, here its operators run",
}


def reasons_of(model: nn.Module, plan: Plan, reused: frozenset[str]) -> tuple[str, ...]:
    """Those that ``model``, not wrapped, has under ``plan``; ``reused`` as :func:`reused_units` gives it."""
    parted = forwards_of(model, plan).parted
    biases = any(one.style == "rowwise" and model.get_submodule(fqn).bias is not None for fqn, one in parted.items())
    rnns = any(isinstance(module, nn.RNNBase) for module in model.modules())
    is_late = plan.step.microbatches > 1 and plan.parallel.mode != "replicate"
    is_ddp = plan.parallel.mode == "replicate"
    rings = plan.run.reduce == "ring" and is_ddp and plan.run_world > 2  # x + y is y + x
    found = {"reused_unit": bool(reused) and is_late, "rowwise_bias": biases, "ddp_buckets": rings, "fused_rnn": rnns}
    return tuple(name for name, there in found.items() if there)


def reused_units(model: nn.Module, plan: Plan, call: Callable[[nn.Module], object]) -> frozenset[str]:
    """Modules of the plan's entries that ``call(model)``, one forward, calls more than once; ``model`` is used up by that."""
    counts: Counter[str] = Counter()

    def count(fqn: str, *_: object) -> None:
        counts[fqn] += 1

    for fqn in units_of(model, plan.bucket.plan):
        model.get_submodule(fqn).register_forward_pre_hook(partial(count, fqn))
    with torch.enable_grad():  # a loss may go backward within forward
        call(model)
    return frozenset(fqn for fqn, times in counts.items() if times > 1)
