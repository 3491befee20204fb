"""Captures with layers repeated, beside the full trace, of any model and plan settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.repeat import Captured, trace_repeated
from pytest_fxbucket.capture.repeat_template import Traced
from pytest_fxbucket.capture.shard import ShardPolicy
from pytest_fxbucket.capture.step import call_model, capture_step
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_group import fake_world
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode


class Case:
    """One model with its batch and loss, on a fake world of four ranks."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        batch: Any,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        reshard: bool = True,
        ranks: int = 4,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.build, self.batch, self.loss, self.reshard, self.ranks = build, batch, loss, reshard, ranks
        self.policy = ShardPolicy(ranks, "0", param_dtype, reduce_dtype)
        self.mode = FakeTensorMode()
        self.fakes = pytree.tree_map(lambda x: self.mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, batch)
        self.traces: list[int] = []
        """How many modules each model had that was traced."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self.mode:
            return self.build()

    def trace(self, model: nn.Module) -> Traced:
        self.traces.append(len(list(model.modules())))
        step = capture_step(model, self.batch, self.loss, self.policy, self.mode, rank=0, reshard_after_forward=self.reshard)
        return Traced(step.graphs["joint"], step.inputs["joint"], step.outputs["joint"])

    def forward(self, model: nn.Module) -> object:
        with self.mode:
            return self.loss(call_model(model, self.fakes), self.fakes)

    def repeated(self, model: nn.Module | None = None) -> Captured:
        with fake_world(0, self.ranks):
            return trace_repeated(model or self.model(), self.trace, self.forward)

    def full(self) -> Traced:
        with fake_world(0, self.ranks):
            return self.trace(self.model())
