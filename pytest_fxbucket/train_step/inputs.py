"""Inputs of a step's graph: a fake twin of everything that the step may read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.roles import Role, Value
from pytest_fxbucket.capture.twins import fake_twin
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step.live import rate_tensor

if TYPE_CHECKING:
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
    from pytest_fxbucket.train_step.live import Live
    from pytest_fxbucket.train_step.recorder import StepRecorder
    from pytest_fxbucket.train_step.signature import Arguments


class Inputs:
    """Twins of ``live`` and of ``arguments``, each an input of the graph that ``recorder`` records.

    Raises :class:`CaptureError` for a learning rate that is a tensor where an update would ask for its value.
    """

    def __init__(self, arguments: Arguments, live: Live, mode: FakeTensorMode, recorder: StepRecorder) -> None:
        self._live, self._mode, self._recorder = live, mode, recorder
        self.all: list[tuple[Value, torch.Tensor]] = []
        self.twins: dict[int, torch.Tensor] = {}
        """By identity of the real tensor."""
        self._reals: list[torch.Tensor] = []
        """Kept, so that no identity is given away again."""
        for role, tensors in self._tensors(arguments):
            for fqn, tensor in tensors.items():
                if id(tensor) not in self.twins:
                    self._add_twin(role, fqn, tensor)
        self.parameters = {fqn: self.twins[id(tensor)] for fqn, tensor in live.params.items()}
        for fqn, tensor in live.params.items():
            self.parameters[fqn].grad = self.twins[id(tensor.grad)] if tensor.grad is not None else None
        self.rates = self._rates()
        """Learning rates as optimizers get them: numbers that the graph computes, tensors where a kernel takes one."""

    def add(self, role: Role, fqn: str, fake: torch.Tensor) -> None:
        """Make ``fake`` an input; at any time."""
        self.all.append((Value(role, fqn, tuple(fake.shape), fake.dtype), fake))
        self._recorder.late_input(f"{role}_{fqn}", fake)

    def add_removed(self, removed: Mapping[str, torch.Tensor]) -> None:
        """Add state that transformations take out again, as inputs and to the optimizers, which are in their twins' places."""
        for name, tensor in removed.items():
            fqn, _, key = name.rpartition(".")
            if fqn not in self._live.owners:
                continue
            state = self._live.owners[fqn].state[self.parameters[fqn]]
            if key not in state:
                state[key] = fake_twin(self._mode, tensor)
                self.add("state", name, state[key])

    def _add_twin(self, role: Role, fqn: str, tensor: torch.Tensor) -> None:
        fake = self.twins[id(tensor)] = fake_twin(self._mode, tensor)
        self._reals.append(tensor)
        self.add(role, fqn, fake)

    def _tensors(self, arguments: Arguments) -> Iterator[tuple[Role, Mapping[str, torch.Tensor]]]:
        yield "param", self._live.params
        yield "buffer", self._live.buffers
        yield "grad", {fqn: p.grad for fqn, p in self._live.params.items() if p.grad is not None}
        yield "state", self._live.states()
        yield "hyper", {fqn: rate_tensor(rate) for fqn, rate in self._live.rates().items()}
        yield "batch", arguments.tensors()

    def _rates(self) -> dict[str, Any]:
        fakes = {value.fqn: fake for value, fake in self.all if value.role == "hyper"}
        fused = {f"{name}.lr" for name, group in self._live.groups() if group.get("fused")}
        for fqn, rate in self._live.rates().items():
            if isinstance(rate, torch.Tensor) and fqn not in fused:
                raise CaptureError(
                    f"{fqn} is a tensor, whose value the optimizer would ask for; make it a float, which is live, too, or take "
                    "fused=True"
                )
        return {fqn: fake if fqn in fused else self._recorder.number(fake) for fqn, fake in fakes.items()}
