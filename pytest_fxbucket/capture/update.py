"""Traces the update of a training step, clipping and optimizers, into a functional graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.capture.blame import user_frame
from pytest_fxbucket.capture.clip import Clip, clip_
from pytest_fxbucket.capture.functional import make_functional
from pytest_fxbucket.capture.recorder import Recorder
from pytest_fxbucket.capture.roles import Value
from pytest_fxbucket.capture.state import make_state
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError, FxbucketError

if TYPE_CHECKING:
    from torch.optim import Optimizer

Build = Callable[[Mapping[str, torch.Tensor]], Sequence["Optimizer"]]
"""Makes the optimizers of parameters that are given by FQN."""


@dataclass(frozen=True)
class Update:
    """The update as a graph without writes in place."""

    graph_module: fx.GraphModule
    inputs: tuple[Value, ...]
    """Parameters that have a gradient, their gradients, state, learning rates."""
    outputs: tuple[Value, ...]
    """New values of those parameters, then of all state, in the inputs' order."""


def trace_update(build: Build, parameters: Sequence[Value], grads: Collection[str], clip: Clip | None = None) -> Update:
    """Trace one step of the optimizers that ``build`` makes.

    ``parameters`` are local shards in registration order, ``grads`` the FQNs of those that have a gradient; others have no
    state and are no inputs. Gradients come reduced and not clipped. State is named ``<parameter>.<key>``, the learning rate of a
    group ``optimizers.<i>.groups.<j>.lr``, a float64 tensor without dimensions. Optimizers run the way that is eager's default,
    not capturable: step counters and learning rates become Python numbers in the graph. Raises :class:`CaptureError` for an
    optimizer that decides by values, or keeps what changes outside of tensors.
    """
    mode = FakeTensorMode()
    shards = {value.fqn: value for value in parameters}
    with mode:
        fakes = {fqn: torch.empty(value.shape, dtype=value.dtype) for fqn, value in shards.items()}
        optimizers = list(build(fakes))
        held = [fqn for fqn in fakes if fqn in grads]
        for optimizer in optimizers:
            with _named(optimizer):
                make_state([optimizer], [fakes[fqn] for fqn in held])
        hypers = [torch.empty((), dtype=torch.float64) for optimizer in optimizers for _ in optimizer.param_groups]
        gradients = {fqn: torch.empty_like(fakes[fqn]) for fqn in held}
    recorder = Recorder(mode)
    states = _states(optimizers, {id(fake): fqn for fqn, fake in fakes.items()})
    inputs = [*(shards[fqn] for fqn in held), *(_value("grad", fqn, gradients[fqn]) for fqn in held)]
    inputs += [_value("state", state.fqn, state.tensor) for state in states]
    inputs += [_value("hyper", fqn, hyper) for fqn, hyper in zip(_hyper_names(optimizers), hypers, strict=True)]
    tensors = [*(fakes[fqn] for fqn in held), *gradients.values(), *(state.tensor for state in states), *hypers]
    for value, tensor in zip(inputs, tensors, strict=True):
        recorder.input(f"{value.role}_{value.fqn}", tensor)
    with mode, recorder, torch.no_grad():
        if clip is not None and gradients:
            clip_(gradients, clip)
        _step(optimizers, fakes, gradients, hypers, recorder)
    results = [*(fakes[fqn] for fqn in held), *(state.now() for state in states)]
    graph = recorder.graph
    graph.output([recorder.node(tensor) for tensor in results])
    make_functional(graph)
    graph.eliminate_dead_code()
    outputs = [value for value in inputs if value.role in ("param", "state")]
    return Update(fx.GraphModule(torch.nn.Module(), graph), tuple(inputs), tuple(outputs))


@dataclass(frozen=True)
class _State:
    """One tensor of an optimizer's state."""

    fqn: str
    tensor: torch.Tensor
    of: dict[str, Any]
    key: str

    def now(self) -> torch.Tensor:
        """The tensor that is in its place after the step."""
        found: torch.Tensor = self.of[self.key]
        return found


def _states(optimizers: Sequence[Optimizer], fqns: Mapping[int, str]) -> list[_State]:
    return [
        _State(f"{fqns[id(parameter)]}.{key}", value, optimizer.state[parameter], key)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in (optimizer.state[parameter] if parameter in optimizer.state else {}).items()
        if isinstance(value, torch.Tensor)
    ]


def _hyper_names(optimizers: Sequence[Optimizer]) -> list[str]:
    return [
        f"optimizers.{i}.groups.{j}.lr" for i, optimizer in enumerate(optimizers) for j, _ in enumerate(optimizer.param_groups)
    ]


def _step(
    optimizers: Sequence[Optimizer],
    fakes: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    hypers: Sequence[torch.Tensor],
    recorder: Recorder,
) -> None:
    rates = iter(hypers)
    for fqn, fake in fakes.items():
        fake.grad = gradients.get(fqn)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = next(rates)
            if "lr" in group:
                group["lr"] = rate if group.get("fused") else recorder.number(rate)
        before = _described(optimizer)
        with _named(optimizer):
            optimizer.step()
        if changed := next((key for key, kind in _described(optimizer).items() if before.get(key) != kind), None):
            raise CaptureError(f"{_name(optimizer)} keeps {changed} outside of tensors, and changes it; keep it in a tensor")


def _described(optimizer: Optimizer) -> dict[str, object]:
    """State as far as it must not change: which keys there are, and what is no tensor."""
    return {
        key: torch.Tensor if isinstance(value, torch.Tensor) else repr(value)
        for state in optimizer.state.values()
        for key, value in state.items()
    }


@contextmanager
def _named(optimizer: Optimizer) -> Iterator[None]:
    """Raise what cannot be traced as a sentence that names the optimizer, and the user's own frame if there is one."""
    try:
        yield
    except Exception as error:
        frame = user_frame(error)
        text = str(error) if isinstance(error, FxbucketError) else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        where = f" at {frame}" if frame else ""
        raise CaptureError(
            f"the step of {_name(optimizer)} cannot be traced{where}: {text}; SGD, Adam and AdamW can be, among others"
        ) from error


def _name(optimizer: Optimizer) -> str:
    return f"the optimizer {type(optimizer).__name__}"


def _value(role: Any, fqn: str, tensor: torch.Tensor) -> Value:
    return Value(role, fqn, tuple(tensor.shape), tensor.dtype)
