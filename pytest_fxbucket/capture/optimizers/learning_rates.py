"""Learning rates of a plan's schedules, found by stepping torch's schedulers over optimizers made for that alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pytest_fxbucket.errors import PlanError, named
from pytest_fxbucket.plan import schema_model
from pytest_fxbucket.plan.factories import import_callable

_OF_SCHEDULERS = ("params", "lr", "initial_lr", "max_lr", "min_lr")


def scheduled_rates(specs: Sequence[schema_model.Optimizer], optimizers: Sequence[Optimizer], taken: int) -> dict[str, float]:
    """Learning rates of the groups of ``optimizers`` that have a schedule behind ``taken`` steps, by their names in a graph.

    ``optimizers`` are made for this call alone, and their parameters have no gradients. Raises :class:`PlanError` for a
    schedule that raises, gives no scheduler, or changes more than learning rates.
    """
    found = {}
    for number, (spec, optimizer) in enumerate(zip(specs, optimizers, strict=True)):
        if not spec.schedule:
            continue
        where = f"{'[optimizer]' if len(specs) == 1 else f'[[optimizer]] {number + 1}'} schedule {spec.schedule}"
        before = [_others(group) for group in optimizer.param_groups]
        try:
            scheduler = import_callable(spec.schedule, where)(optimizer)
            if isinstance(scheduler, LRScheduler):
                for _ in range(taken):
                    # Without gradients it changes nothing; torch warns of a scheduler that steps before its optimizer.
                    optimizer.step()
                    scheduler.step()
        except PlanError:
            raise
        except Exception as error:
            raise PlanError(f"{where} raised {named(error)}") from error
        if not isinstance(scheduler, LRScheduler):
            kind = type(scheduler).__name__
            raise PlanError(f"{where} gave a value of type {kind}, expected a torch.optim.lr_scheduler.LRScheduler")
        for place, (group, was) in enumerate(zip(optimizer.param_groups, before, strict=True)):
            if changed := next((key for key, value in _others(group).items() if was.get(key) != value), None):
                raise PlanError(f"{where} changes {changed}, which a graph has as a number; only learning rates are its inputs")
            found[f"optimizers.{number}.groups.{place}.lr"] = float(group["lr"])
    return found


def _others(group: dict[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if key not in _OF_SCHEDULERS}


def without_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What stands for a parameter where only rates are asked for."""
    return torch.nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"), requires_grad=dtype.is_floating_point)
