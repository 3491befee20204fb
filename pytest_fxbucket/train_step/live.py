"""A step's tensors where the user keeps them: found by name, read before a call, written after it, and made where missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pytest_fxbucket.capture.functional_operators import extent
from pytest_fxbucket.capture.optimizers.state import first_step_differs, make_state
from pytest_fxbucket.capture.refusals import refuse_lazy
from pytest_fxbucket.compat.dtensors import local_of, of_local
from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.compat.fsdp import Ranks
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.roles import Role, Value
from pytest_fxbucket.train_step.scaling import settings_of, tensors_of
from pytest_fxbucket.train_step.sharded import Sharding

Pair = tuple[str, str]
"""Names, as :func:`called` gives them, of two tensors that share memory."""
_CALLED = {"param": "parameter ", "buffer": "buffer ", "grad": "gradient of ", "batch": "argument "}


class Live:
    """The tensors of a model and its optimizers at one moment, by name; they are the user's own.

    Raises :class:`CaptureError` for an optimizer with a parameter that ``model`` does not have, or that another one has too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        averaged: Ranks | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        """``averaged``: the ranks over which those gradients are averaged that neither FSDP nor DDP reduces."""
        self.model, self.optimizers, self.scaler = model, optimizers, scaler
        self.scaling = tensors_of(scaler)
        self.sharding = Sharding.of(model, averaged)
        self.told = self.sharding.settings_key(), settings_of(scaler)
        """The settings of FSDP and DDP modules and of the scaler, which a graph has as constants."""
        self.params: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.stored = {fqn: self.sharding.stored(fqn, parameter) for fqn, parameter in self.params.items()}
        """What this rank holds of each parameter, with padding."""
        self.buffers: dict[str, torch.Tensor] = dict(model.named_buffers())
        self.fqns = {id(tensor): fqn for fqn, tensor in self.params.items()}
        """FQN of each parameter, by its identity."""
        self.owners: dict[str, Optimizer] = {}
        """The optimizer that has a parameter, by the parameter's FQN."""
        for i, optimizer in enumerate(optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    self._own(optimizer, f"group {j} of optimizer {i} ({type(optimizer).__name__})", parameter)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's local tensors of parameters, buffers and present gradients, by the names that :func:`called` gives."""
        held = self.by_role()
        roles = ((role, held[role]) for role in ("param", "buffer", "grad"))
        return {called(role, fqn): tensor for role, tensors in roles for fqn, tensor in tensors.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The present gradients, by the parameter's FQN."""
        return {fqn: parameter.grad for fqn, parameter in self.params.items() if parameter.grad is not None}

    def refuse_told_otherwise(self) -> None:
        """Raise :class:`CaptureError` if the settings of FSDP or DDP modules, or of the scaler, have changed since."""
        now = Sharding.of(self.model, self.sharding.averaged).settings_key(), settings_of(self.scaler)
        if now != self.told:
            raise CaptureError(
                "the step leaves the model told otherwise than before it (set_requires_gradient_sync, a divisor, growth of the "
                "scaler, ...), which a graph does not do again; tell it outside the step"
            )

    def groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every parameter group, with its name ``optimizers.<i>.groups.<j>``."""
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                yield f"optimizers.{i}.groups.{j}", group

    def states(self) -> dict[str, torch.Tensor]:
        """This rank's local tensors of the optimizers' state, by ``<parameter>.<key>``, and the scaler's tensors."""
        return self.scaling | {
            f"{fqn}.{key}": local_of(value)
            for fqn, optimizer in self.owners.items()
            for key, value in self.state_of(fqn, optimizer).items()
            if isinstance(value, torch.Tensor)
        }

    def by_role(self) -> dict[Role, Mapping[str, torch.Tensor]]:
        """This rank's local part of every tensor that a graph can have as input, by role and name."""
        # A learning rate is an input of the graph: float64 without dimensions, or the user's own tensor.
        rates = {
            fqn: rate if isinstance(rate, torch.Tensor) else torch.tensor(float(rate), dtype=torch.float64)
            for fqn, rate in self.rates().items()
        }
        return {
            "param": self.stored,
            "buffer": {fqn: local_of(buffer) for fqn, buffer in self.buffers.items()},
            "grad": {fqn: local_of(gradient) for fqn, gradient in self.gradients().items()},
            "state": self.states(),
            "hyper": rates,
        }

    def state_of(self, fqn: str, optimizer: Optimizer) -> Mapping[str, Any]:
        """State of one parameter; empty if it has none yet."""
        found: Mapping[str, Any] = optimizer.state.get(self.params[fqn], {})
        return found

    def rates(self) -> dict[str, Any]:
        """Learning rates, by ``optimizers.<i>.groups.<j>.lr``: numbers, or tensors if the user made them so."""
        return {f"{name}.lr": group["lr"] for name, group in self.groups() if "lr" in group}

    def _own(self, optimizer: Optimizer, where: str, parameter: torch.Tensor) -> None:
        fqn = self.fqns.get(id(parameter))
        if fqn is None:
            raise CaptureError(
                f"{where} has a parameter of shape {tuple(parameter.shape)} that the model does not have; give "
                "capture_step the model whose parameters the optimizer has"
            )
        if self.owners.setdefault(fqn, optimizer) is not optimizer:
            raise CaptureError(f"{where} has parameter {fqn}, which another optimizer has too; give each parameter to one")


class LiveValues:
    """The tensors of one call by role and name: those of ``live``, the arguments, and the state that transforms ``added``."""

    def __init__(
        self,
        arguments: Mapping[str, torch.Tensor],
        live: Live,
        added: Mapping[str, torch.Tensor],
        specs: Mapping[str, Any] = {},
    ) -> None:
        """``specs``: the DTensor spec of each gradient that is a DTensor, by FQN."""
        self._live, self._specs = live, specs
        self._rates = live.rates()
        self._of: dict[Any, Mapping[str, torch.Tensor]] = {**live.by_role(), "batch": arguments}
        self._of["state"] = {**added, **self._of["state"]}
        self._taken: dict[tuple[str, str], torch.Tensor] = {}
        """The tensors that the graph was given as inputs, and that results may be written into."""

    def own(self, value: Value) -> Any:
        """The user's own object behind an input: a parameter itself, not the local tensor that the graph gets."""
        if value.role == "hyper":
            return self._rates[value.fqn]
        return self._live.params[value.fqn] if value.role == "param" else self._of[value.role][value.fqn]

    def find(self, role: str, fqn: str) -> torch.Tensor | None:
        """The current tensor of a parameter, buffer or state; None if it is gone."""
        return self._of[role].get(fqn)

    def gather(self, inputs: Iterable[Value]) -> list[torch.Tensor]:
        """Tensors for the graph. Raises :class:`CaptureError` for one that is missing or has another shape or dtype."""
        for value in inputs:
            found = self._of[value.role].get(value.fqn)
            if found is None:
                raise CaptureError(
                    f"{value.role} {value.fqn} is missing, which a transform added; load it into the state of the captured step"
                )
            if (tuple(found.shape), found.dtype) != (value.shape, value.dtype):
                raise CaptureError(
                    f"{value.role} {value.fqn} has shape {tuple(found.shape)} and dtype {found.dtype}, but the step was traced "
                    f"with shape {value.shape} and dtype {value.dtype}; load what fits"
                )
            self._taken[value.key] = found
        return list(self._taken.values())

    def write(self, outputs: Iterable[Value], results: Sequence[Any], cleared: Iterable[str]) -> dict[str, Any]:
        """Write new values into the user's own tensors, in place, and drop the gradients of parameters that are ``cleared``.

        Gives the other results by name.
        """
        given: dict[str, Any] = {}
        targets: list[torch.Tensor] = []
        news: list[torch.Tensor] = []
        for value, result in zip(outputs, results, strict=True):
            target = self._taken.get(value.key)
            if target is not None:
                targets.append(target)
                news.append(result)
            elif value.role == "grad":
                parameter = self._live.params[value.fqn]
                parameter.grad = of_local(result, self._specs.get(value.fqn))
            else:
                given[value.fqn] = result
        # All at once: a new value that lies where another is to be written is copied first.
        written = {storage_key(target) for target in targets}
        with torch.no_grad():
            safe = [new.clone() if storage_key(new) in written else new for new in news]
            if safe:
                torch._foreach_copy_(targets, safe)
        for fqn in cleared:
            self._live.params[fqn].grad = None
        return given


class StateMaking:
    """Makes the optimizer state that one call needs and that does not exist yet; can undo all of it.

    ``removed``: state that transformations took out, which is not made again. ``added``: state that they put in, which no
    optimizer has.
    """

    def __init__(self, live: Live, removed: Mapping[str, Any], added: Collection[str]) -> None:
        self._live, self._removed, self._added = live, removed, added
        self._before: dict[str, dict[str, Any]] = {}

    def make(self, inputs: Iterable[Value]) -> None:
        """Make what ``inputs`` need. Raises :class:`CaptureError` for a parameter that has only a part of its state."""
        there = self._live.states()
        missing = [v.fqn for v in inputs if v.role == "state" and v.fqn not in there and v.fqn not in self._added]
        wanted = dict.fromkeys(name.rpartition(".")[0] for name in missing if name not in self._removed)
        if not wanted:
            return
        for name in missing:
            fqn, _, key = name.rpartition(".")
            owner = self._live.owners[fqn]
            if self._live.state_of(fqn, owner):
                raise CaptureError(
                    f"parameter {fqn} has state in the optimizer {type(owner).__name__}, but no {key}; "
                    "load a state_dict that has it"
                )
        for optimizer in self._live.optimizers:
            own = [fqn for fqn in wanted if self._live.owners[fqn] is optimizer]
            if own:
                refuse_first_step(optimizer)
                self._remember(own)
                make_state([optimizer], [self._live.params[fqn] for fqn in own])
                # The optimizer makes all of a parameter's state at once, also what transformations removed.
                self.drop(name for name in self._removed if name.rpartition(".")[0] in own)

    def drop(self, names: Iterable[str]) -> None:
        """Take state out of the optimizers."""
        for name in names:
            fqn, _, key = name.rpartition(".")
            if fqn in self._live.owners:
                self._remember([fqn])
                self._live.owners[fqn].state[self._live.params[fqn]].pop(key, None)

    def undo(self) -> None:
        """Put everything back."""
        for fqn, state in self._before.items():
            held = self._live.owners[fqn].state
            if state:
                held[self._live.params[fqn]] = state
            else:
                # Before there was nothing, so not even an empty entry may stay.
                held.pop(self._live.params[fqn], None)
        self._before.clear()

    def _remember(self, fqns: Iterable[str]) -> None:
        for fqn in fqns:
            # The first copy counts: a later one would have what was made meanwhile.
            self._before.setdefault(fqn, dict(self._live.state_of(fqn, self._live.owners[fqn])))


def refuse_first_step(optimizer: Optimizer) -> None:
    """Raise :class:`CaptureError` for an optimizer whose first step computes otherwise than later ones: no graph fits both."""
    for group in optimizer.param_groups:
        if first_step_differs(group):
            raise CaptureError(
                "it is SGD with dampening, which takes its first gradient whole and no later one; take one step without "
                "capture before, or set dampening to 0"
            )


def called(role: str, fqn: str) -> str:
    """The name of a tensor in a sentence."""
    return f"{_CALLED.get(role, f'{role} ')}{fqn}"


def refuse_sparse(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`CaptureError` for a tensor without one memory of its own; ``tensors`` by their names in sentences."""
    refuse_lazy(tensors.items())
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{name} is sparse ({tensor.layout}); a captured step takes dense tensors, so give what to_dense() gives, or "
                "leave sparse=True out"
            )


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[Pair]:
    """Names of each two different tensors whose memory overlaps, each taken from its first byte to its last."""
    # A sweep over memory in the order of addresses: a tensor overlaps all that began before it and have not ended yet.
    spans = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items())
    open_ones: list[tuple[int, str, torch.Tensor]] = []
    for start, name in spans:
        tensor = tensors[name]
        first, last = extent(tensor)
        end = start + (last - first) * tensor.element_size()
        if not start or start == end:  # without memory, such as an empty tensor
            continue
        open_ones = [one for one in open_ones if one[0] > start]
        yield from ((other, name) for _, other, one in open_ones if one is not tensor and one.device == tensor.device)
        open_ones.append((end, name, tensor))


def refuse_shared_writes(pairs: Iterable[Pair], written: Iterable[Value]) -> None:
    """Raise :class:`CaptureError` if a tensor of one of ``pairs`` is ``written``: a graph reads all before it writes any."""
    names = {called(value.role, value.fqn) for value in written}
    for one, other in pairs:
        if one in names or other in names:
            # The pair is ordered by address, which differs from run to run. The sentence always has arguments first.
            one, other = sorted((one, other), key=lambda name: (not name.startswith("argument "), name))
            both = f"{one} and {other}"
            if other.startswith("argument "):  # then one does too
                both = f"arguments {one[9:]} and {other[9:]}"
            raise CaptureError(f"{both} share memory, and the step writes there; pass it once, or a clone")
