"""Fake twins of all tensors that a step may read: they are the graph's inputs, and stand in the real tensors' places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pytest_fxbucket.capture.model import fake_twin, hooks_behind_gradient, in_modules, take_hooks
from pytest_fxbucket.capture.optimizers.state import own_numbers, put_back_numbers
from pytest_fxbucket.compat.dtensors import is_dtensor, local_of, of_local, placed_as, spec_of
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.fsdp import Shard
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.roles import Role, Value
from pytest_fxbucket.train_step.guards import PLAIN, Arguments, plain_values
from pytest_fxbucket.train_step.live import Live
from pytest_fxbucket.train_step.recorder import StepRecorder


class Inputs:
    """Fake twins of the tensors of ``live`` and ``arguments``, each an input of the graph that ``recorder`` records.

    Raises :class:`CaptureError` for a learning rate that is a tensor where an update would ask for its value.
    """

    def __init__(self, arguments: Arguments, live: Live, mode: FakeTensorMode, recorder: StepRecorder) -> None:
        self._live, self._mode, self._recorder = live, mode, recorder
        self.all: list[tuple[Value, torch.Tensor]] = []
        self.twins: dict[int, torch.Tensor] = {}
        """Twins by the identity of the real tensor."""
        self._reals: list[torch.Tensor] = []
        """Kept alive, so that no other tensor gets the identity of one of them."""
        self.stored: dict[str, torch.Tensor] = {}
        """Twins of this rank's local part of each parameter, with the padding of FSDP's shards, by FQN."""
        self.updated: dict[str, torch.Tensor] = {}
        """By FQN the tensor that an optimizer updates: the parameter's twin, or of a DTensor the local part without padding."""
        # First a twin of each local tensor, which becomes an input of the graph. Around these twins come DTensors like the
        # real ones, for modules and gradients. One real tensor under two names has one twin, so that it is one input.
        for role, tensors in {**live.by_role(), "batch": arguments.tensors()}.items():
            for fqn, tensor in tensors.items():
                if id(tensor) not in self.twins:
                    self.twins[id(tensor)] = fake_twin(mode, tensor)
                    self._reals.append(tensor)
                    self.add(role, fqn, self.twins[id(tensor)])
        held = live.by_role()
        for fqn, tensor in live.params.items():
            self.stored[fqn] = self.twins[id(held["param"][fqn])]
            self.updated[fqn] = self._without_padding(self.stored[fqn], local_of(tensor))
            self.twins[id(tensor)] = _placed(self.updated[fqn], tensor)
            if fqn in live.sharding.travelling:
                _take_hooks_of_fsdp(self.twins[id(tensor)], tensor, live.sharding.travelling[fqn].shard)
            elif is_dtensor(tensor):
                take_hooks(self.twins[id(tensor)], tensor)
        for fqn, buffer in live.buffers.items():
            self.twins[id(buffer)] = of_local(self.twins[id(held["buffer"][fqn])], spec_of(buffer))
        self.parameters = {fqn: self.twins[id(tensor)] for fqn, tensor in live.params.items()}
        for fqn, gradient in live.gradients().items():
            self.twins[id(gradient)] = of_local(self.twins[id(held["grad"][fqn])], spec_of(gradient))
        for fqn, tensor in live.params.items():
            self.parameters[fqn].grad = self.twins[id(tensor.grad)] if tensor.grad is not None else None
        self.rates = self._rates()
        """Learning rates as optimizers get them while they are traced: live numbers, or tensors where a kernel takes one."""

    def _without_padding(self, stored: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        # The graph gathers the padded shard, as FSDP does, so the input has padding. Optimizers update a view of it, which the
        # graph records, so that an update of the view is a write to the input.
        if stored.shape == local.shape:
            return stored
        with self._mode, self._recorder, torch.no_grad():
            return stored.narrow(0, 0, local.shape[0])

    def add(self, role: Role, fqn: str, fake: torch.Tensor) -> None:
        """Make ``fake`` an input, also when the trace has begun."""
        self.all.append((Value(role, fqn, tuple(fake.shape), fake.dtype), fake))
        self._recorder.late_input(f"{role}_{fqn}", fake)

    def add_removed(self, removed: Mapping[str, torch.Tensor]) -> None:
        """Add state that transformations take out again after the trace: to the graph's inputs, and to the optimizers' state.

        The optimizers' code still reads that state. To be called while they hold the twins (:func:`in_optimizers`).
        """
        for name, tensor in removed.items():
            fqn, _, key = name.rpartition(".")
            if fqn not in self._live.owners:
                continue
            state = self._live.owners[fqn].state[self.updated[fqn]]
            if key not in state:
                state[key] = fake_twin(self._mode, tensor)
                self.add("state", name, state[key])

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


def _placed(local: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A DTensor like the parameter ``real`` with ``local`` inside; ``local`` itself if ``real`` is no DTensor."""
    if not is_dtensor(real):
        return local
    twin = of_local(local, spec_of(real), requires_grad=real.requires_grad)
    twin._is_param = True  # what makes isinstance(twin, nn.Parameter) true
    # Attributes that somebody gave the parameter, which the step's code may read.
    for name, value in vars(real).items():
        if not hasattr(twin, name):
            setattr(twin, name, value)
    return twin


def _take_hooks_of_fsdp(twin: torch.Tensor, real: torch.Tensor, shard: Shard) -> None:
    """Give ``twin`` those hooks of ``real`` that FSDP2 runs: none of its gradient's, and others where that is reduced."""

    def where_reduced(hook: Callable[[torch.Tensor], None], parameter: torch.Tensor) -> None:
        if shard.is_reduced:
            hook(parameter)

    for hook in hooks_behind_gradient(real):
        twin.register_post_accumulate_grad_hook(partial(where_reduced, hook))


def refuse_other_kinds(live: Live) -> None:
    """Raise :class:`CaptureError` for a parameter or buffer that is a tensor subclass other than DTensor."""
    for fqn, tensor in (live.params | live.buffers).items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not is_dtensor(tensor):
            raise CaptureError(
                f"{fqn} is a tensor of type {type(tensor).__name__}; a captured step takes plain tensors and DTensors, so keep "
                "the local part as parameter and let forward make the rest of it"
            )


@contextmanager
def unchanged_modules(model: nn.Module, twins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """While inside, modules have ``twins`` (by identity of the real tensor) as parameters and buffers; then all is as before.

    Raises :class:`CaptureError` on leaving if a module replaced a buffer or set an attribute, which a graph would not repeat.
    """
    with in_modules(model, twins):
        before = [(fqn, module, dict(vars(module)), dict(module._buffers)) for fqn, module in model.named_modules()]
        yield
        for fqn, module, attributes, _ in before:
            for name, value in vars(module).items():
                was = attributes.get(name)
                is_equal = isinstance(was, PLAIN) and isinstance(value, PLAIN) and repr(was) == repr(value)
                if name not in attributes or (was is not value and not is_equal):
                    raise CaptureError(
                        f"module {fqn or 'at the root'} sets its attribute {name} in forward, which a graph does not do again; "
                        "give it back from forward, or keep it in a buffer"
                    )
        for fqn, module, _, buffers in before:
            if name := next((name for name, value in module._buffers.items() if value is not buffers.get(name)), ""):
                raise CaptureError(
                    f"buffer {f'{fqn}.{name}'.lstrip('.')} is replaced in forward; write it in place, as with copy_"
                )


@contextmanager
def in_optimizers(live: Live, inputs: Inputs) -> Iterator[Callable[[Optimizer], None]]:
    """While inside, optimizers hold the twins of parameters, state and learning rates; then all is as before.

    Raises :class:`CaptureError` on leaving if a parameter group, or a value of the state that is no tensor, was changed. It is
    given a function to call when state of an optimizer was made: what is no tensor of that counts from then on.
    """
    twins, rates, updated = inputs.twins, inputs.rates, inputs.updated
    before = [(optimizer, optimizer.state, list(optimizer.param_groups)) for optimizer in live.optimizers]
    groups = [(name, group, dict(group)) for name, group in live.groups()]
    try:
        for optimizer, state, _ in before:
            known = (
                (updated[live.fqns[id(parameter)]], held) for parameter, held in state.items() if id(parameter) in live.fqns
            )
            # State is kept by the tensors that optimizers step, which of DTensors are the local parts (stepped_by_parts).
            stood_for = {twin: {key: _twin(twins, value) for key, value in held.items()} for twin, held in known}
            optimizer.state = defaultdict(dict, stood_for)
        plain = {id(optimizer): _plain_state(optimizer) for optimizer in live.optimizers}
        for name, group, _ in groups:
            group["params"] = [twins[id(parameter)] for parameter in group["params"]]
            if f"{name}.lr" in rates:
                group["lr"] = rates[f"{name}.lr"]
        with _uncounted(live.optimizers):
            yield lambda optimizer: plain[id(optimizer)].update(_plain_state(optimizer) | plain[id(optimizer)])
        for optimizer, _, held in before:
            _refuse_new_state(optimizer, held, plain[id(optimizer)])
        for name, group, was in groups:
            if group.get("lr") is not rates.get(f"{name}.lr", was.get("lr")):
                raise CaptureError(f"the step sets the learning rate of {name}; call the scheduler after the step, not in it")
            values = plain_values(was)
            if changed := [key for key, value in plain_values(group).items() if values.get(key) != value]:
                raise CaptureError(f"the step sets {changed[0]} of {name}; set it between steps, not in one")
    finally:
        for optimizer, state, held in before:
            optimizer.state = state
            # In place: schedulers and the user may hold this very list, and these very dicts.
            optimizer.param_groups[:] = held
        for _, group, was in groups:
            group.clear()
            group.update(was)


@contextmanager
def stepped_by_parts(optimizer: Optimizer, inputs: Inputs) -> Iterator[None]:
    """While inside, ``optimizer`` has this rank's local parts of its parameters and gradients instead of DTensors.

    An update that treats each element by itself gives on parts the bits that it gives on whole tensors. Others are refused when
    the step is over.
    """
    fqns = {id(twin): fqn for fqn, twin in inputs.parameters.items()}
    before = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, twins in before:
            group["params"] = [inputs.updated[fqns[id(twin)]] for twin in twins]
            for twin, part in zip(twins, group["params"], strict=True):
                if part is not twin:
                    # A gradient need not be placed as its parameter: it may be a sum that is still to be taken over ranks.
                    part.grad = None if twin.grad is None else placed_as(twin.grad, spec_of(twin))
        yield
    finally:
        for group, twins in before:
            for twin, part in zip(twins, group["params"], strict=True):
                if part is not twin:
                    part.grad = None
            group["params"] = twins


def _twin(twins: Mapping[int, torch.Tensor], value: Any) -> Any:
    return twins.get(id(local_of(value)), value) if isinstance(value, torch.Tensor) else value


def _plain_state(optimizer: Optimizer) -> dict[tuple[int, str], str]:
    return {
        (id(parameter), key): repr(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if not isinstance(value, torch.Tensor)
    }


@contextmanager
def _uncounted(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Put numbers back that optimizers keep in attributes; raises :class:`CaptureError` if the block changed one."""
    before = [(optimizer, own_numbers(optimizer)) for optimizer in optimizers]
    try:
        yield
        for optimizer, was in before:
            now = own_numbers(optimizer)
            if name := next((name for name in {**was, **now} if repr(was.get(name)) != repr(now.get(name))), ""):
                raise CaptureError(
                    f"the optimizer {type(optimizer).__name__} sets its attribute {name} in a step, which a graph does not do "
                    "again; keep it in a tensor of its state, or take the first step without capture if it is set there alone"
                )
    finally:
        for optimizer, was in before:
            put_back_numbers(optimizer, was)


def _refuse_new_state(optimizer: Optimizer, groups: list[Any], before: Mapping[tuple[int, str], str]) -> None:
    name = type(optimizer).__name__
    if len(optimizer.param_groups) != len(groups):
        raise CaptureError(f"the step adds a parameter group to the optimizer {name}; add it before the step is called")
    for (parameter, key), value in _plain_state(optimizer).items():
        if before.get((parameter, key), value) != value:
            raise CaptureError(f"the optimizer {name} keeps {key} outside of tensors, and changes it; keep it in a tensor")
