"""Forward and backward of a model whose layers are traced once and repeated, as ``[step] reuse_layers`` asks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.joint import Joint, LossFn, trace_joint
from pytest_fxbucket.capture.override.overrides import NONE, Overrides
from pytest_fxbucket.capture.parallel.forwards import Forwards
from pytest_fxbucket.capture.parallel.parts import Parts, describe_parameters
from pytest_fxbucket.capture.repeat.repeated import trace_repeated
from pytest_fxbucket.capture.repeat.template import Traced
from pytest_fxbucket.capture.split_batch import split_of
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.plan.inputs import Path

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode


def trace_reusing(
    model: nn.Module,
    batch: Any,
    loss: LossFn,
    parts: Parts,
    forwards: Forwards,
    fake_mode: FakeTensorMode,
    count: int = 1,
    overrides: Overrides = NONE,
    inputs: Sequence[Path] = (),
) -> Joint:
    """As :func:`trace_joint`; says which layers were repeated, or why none."""
    if overrides:
        joint = trace_joint(model, batch, loss, parts, forwards, fake_mode, count, overrides, inputs)
        return replace(joint, reused="all layers traced, since modules are overridden")
    asked = Asked(model, batch, loss, parts, forwards, fake_mode, count, inputs)
    found = trace_repeated(model, asked.trace, asked.forward, asked.treatment)
    with fake_mode:
        parameters = describe_parameters(model, parts, forwards.parted, forwards.expert_parameters(model))
    told = f"{found.repeated} repeated" if found.repeated else f"all layers traced, since {found.reason}"
    return Joint(found.traced.graph_module, found.traced.inputs, found.traced.outputs, tuple(parameters), told)


@dataclass
class Asked:
    """What is to be traced of ``model``, and of ``model`` when it has fewer layers for a while."""

    model: nn.Module
    batch: Any
    loss: LossFn
    parts: Parts
    forwards: Forwards
    fake_mode: FakeTensorMode
    count: int = 1
    inputs: Sequence[Path] = ()

    def __post_init__(self) -> None:
        self._fqns = {id(module): fqn for fqn, module in self.model.named_modules()}
        self._fakes = pytree.tree_map(
            lambda leaf: self.fake_mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, self.batch
        )

    def trace(self, model: nn.Module) -> Traced:
        """The joint graph of ``model`` as it is now."""
        forwards = self._forwards(model)
        joint = trace_joint(model, self.batch, self.loss, self.parts, forwards, self.fake_mode, self.count, inputs=self.inputs)
        return Traced(joint.graph, joint.inputs, joint.outputs)

    def forward(self, model: nn.Module) -> object:
        """Forward and loss on fake tensors, whole parameters, not traced."""
        with self.fake_mode:
            split = split_of(model, self.batch, self.inputs)
            return split.loss(self.loss, split.call(model, self._fakes), self._fakes)

    def treatment(self, fqn: str) -> Hashable:
        """What the plan does to the module ``fqn``."""
        forwards = self.forwards
        return forwards.parted.get(fqn), forwards.experts.get(fqn), fqn in forwards.recomputed, fqn in forwards.units

    def _forwards(self, model: nn.Module) -> Forwards:
        """The same modules by their names of now."""
        now = {self._fqns[id(module)]: fqn for fqn, module in model.named_modules()}
        return Forwards(
            {now[fqn]: parted for fqn, parted in self.forwards.parted.items() if fqn in now},
            {now[fqn]: experts for fqn, experts in self.forwards.experts.items() if fqn in now},
            [now[fqn] for fqn in self.forwards.recomputed if fqn in now],
            [now[fqn] for fqn in self.forwards.units if fqn in now],
            self.forwards.resharding.renamed(now),
        )
