"""Captures with layers repeated, beside the full trace, of any model and plan settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import repeat_models as models
import torch
from torch import nn

from pytest_fxbucket.capture.mesh import fake_mesh, mesh_of
from pytest_fxbucket.capture.parallel.forwards import forwards_of
from pytest_fxbucket.capture.parallel.parts import Parts
from pytest_fxbucket.capture.repeat.confirm import refuse_other
from pytest_fxbucket.capture.repeat.repeated import Captured, repeat_layers, trace_repeated
from pytest_fxbucket.capture.repeat.reusing import Asked
from pytest_fxbucket.capture.repeat.template import Traced
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.graph.portable import digest, encode_module
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Parallel, Plan, Step


class Case:
    """One model with its batch and loss, on a fake mesh of four ranks."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        batch: Any,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        microbatches: int = 1,
        checkpoint: str = "",
        **parallel: Any,
    ) -> None:
        self.build, self.batch, self.loss = build, batch, loss
        entries = parse_entries([checkpoint], "checkpoint") if checkpoint else ()
        step = Step(microbatches=microbatches, checkpoint=entries)
        self.plan = Plan(Path("plan.toml"), parallel=Parallel(**{"dp_shard": 4, **parallel}), step=step)
        self.mesh, self.mode = mesh_of(self.plan), FakeTensorMode()
        self.traces: list[int] = []
        """How many modules each model had that was traced."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self.mode:
            return self.build()

    def repeated(self, model: nn.Module | None = None) -> Captured:
        with fake_mesh(self.mesh, 0):
            asked = self._asked(model or self.model())
            return trace_repeated(asked.model, partial(self._trace, asked), asked.forward, asked.treatment)

    def every_layer_alike(self) -> Traced:
        """Repeated layer by layer; raises what speaks against it."""
        with fake_mesh(self.mesh, 0):
            asked = self._asked(self.model())
            return repeat_layers(asked.model, asked.trace, asked.forward, 1, asked.treatment)[1]

    def full(self) -> Traced:
        with fake_mesh(self.mesh, 0):
            asked = self._asked(self.model())
            return asked.trace(asked.model)

    def _trace(self, asked: Asked, model: nn.Module) -> Traced:
        self.traces.append(len(list(model.modules())))
        return asked.trace(model)

    def _asked(self, model: nn.Module) -> Asked:
        parts, forwards = Parts.of(self.plan.parallel, self.mesh), forwards_of(model, self.plan)
        return Asked(model, self.batch, self.loss, parts, forwards, self.mode, self.plan.step.microbatches)


def case_of(build: Callable[..., nn.Module], *args: Any, **rest: Any) -> Case:
    return Case(partial(build, *args), models.batch(), models.loss, **rest)


def assert_same(case: Case, repeated: str) -> None:
    """Repeated as ``repeated`` says, and like the full trace in every node, edge, name, value, storage and stack."""
    found = case.repeated()
    assert (found.repeated, found.reason) == (repeated, "")
    full = case.full()
    refuse_other(found.traced, full)
    here, there = encode_module(found.traced.graph_module), encode_module(full.graph_module)
    assert here.rows == there.rows
    assert digest(here) == digest(there)
