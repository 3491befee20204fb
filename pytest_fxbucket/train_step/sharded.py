"""Models that the user has already put under ``fully_shard``, DDP or ``parallelize_module``, captured as they are.

While the step is traced, FSDP's hooks and DDP's own forward (replicated.py) are removed. In their place the graph gathers each
parameter that forward reads, where FSDP's hooks would, and reduces gradients as torch does. All other operators on DTensors,
such as those of tensor parallelism and of gradient clipping, are recorded as the operators on local tensors that DTensor makes
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.backward import together, with_gradient
from pytest_fxbucket.capture.model import hooks_behind_gradient
from pytest_fxbucket.capture.names import NodeNamer, inputs_cast, outputs_cast
from pytest_fxbucket.capture.parallel.modes import ParallelMode, Sharded
from pytest_fxbucket.capture.parallel.unshard import ParameterTravel, read_by
from pytest_fxbucket.compat.dtensors import local_of, of_local, placed_as, spec_of
from pytest_fxbucket.compat.fsdp import Ranks, Shard, Unit, own_hooks, units_of
from pytest_fxbucket.compat.modules import each_tensor, is_replicated, tensors_within
from pytest_fxbucket.compat.tracing import at_end_of_backward
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.mesh import Group
from pytest_fxbucket.train_step.replicated import averaged, refuse_settings, under_ddp


def _mode(unit: Unit, shard: Shard) -> ParallelMode:
    copies = Group(*shard.copies) if shard.copies is not None else None
    # Where the unit has no reduce_dtype, gradients are reduced in the dtype in which they come, that of compute.
    reduced = shard.reduction(unit.reduce_dtype or unit.param_dtype or shard.parameter.dtype)
    return Sharded("dp_shard", Group(*shard.over), copies, True, reduced.after, reduced.ops, reduced.before)


@dataclass(frozen=True, slots=True)
class GatheredParameter:
    """A sharded parameter, which is gathered before it is read."""

    travel: ParameterTravel
    shard: Shard
    root: int
    """Number of the outermost unit that its unit is in."""


@dataclass
class Sharding:
    """How a model's parameters are sharded or replicated at this moment."""

    model: nn.Module
    units: list[Unit] = field(default_factory=list)
    travelling: dict[str, GatheredParameter] = field(default_factory=dict)
    """Sharded parameters, by FQN."""
    replicas: dict[str, nn.Module] = field(default_factory=dict)
    """Modules under DDP, by FQN."""
    averaged: Ranks | None = None
    """The ranks over which those gradients are averaged that neither FSDP nor DDP reduces."""

    @classmethod
    def of(cls, model: nn.Module, averaged: Ranks | None = None) -> Sharding:
        """Read ``model``. Raises :class:`CaptureError` for settings of FSDP or DDP that a graph cannot take over."""
        found = cls(model, units_of(model), averaged=averaged)
        fqns = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
        root = 0
        for unit in found.units:
            root += unit.is_root
            for shard in unit.shards:
                fqn = fqns[id(shard.parameter)]
                travel = ParameterTravel(
                    _mode(unit, shard), shard.shape, unit.param_dtype, unit.reduce_dtype, fqn, "fully_shard"
                )
                found.travelling[fqn] = GatheredParameter(travel, shard, root)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                refuse_settings(name, module)
                found.replicas[name] = module
            elif is_replicated(module):
                where = f"module {name}" if name else "the model"
                raise CaptureError(f"{where} is under replicate(), which a captured step does not take over; put it under DDP")
        return found

    def gathered_again(self) -> set[str]:
        """FQNs of the parameters that are gathered once more for backward."""
        again = {id(shard) for unit in self.units if unit.reshards for shard in unit.shards}
        return {fqn for fqn, one in self.travelling.items() if id(one.shard) in again}

    def settings_key(self) -> Hashable:
        """A key of the present settings: how gradients are reduced, inputs and outputs cast, and parameters gathered."""
        shards = tuple((fqn, one.travel, one.shard.flags) for fqn, one in self.travelling.items())
        units = tuple((unit.input_dtype, unit.output_dtype, unit.reshards) for unit in self.units)
        replicas: dict[str, Any] = dict(self.replicas)
        synced = tuple((fqn, module.require_backward_grad_sync) for fqn, module in replicas.items())
        return shards, units, synced, self.averaged

    def stored(self, fqn: str, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's local part of ``parameter``, with the padding that FSDP gathers."""
        found = self.travelling.get(fqn)
        if found is None or found.shard.padded == local_of(parameter).shape:
            return local_of(parameter)
        return found.shard.stored()


@dataclass(frozen=True, slots=True)
class FirstGather:
    """What was gathered of a parameter in the first forward: what reduces its gradient takes those of later forwards, too."""

    whole: torch.Tensor
    later: list[torch.Tensor]
    """In a backward, the gradients that came from what was gathered in later forwards."""

    def take(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of what was gathered later is one of this."""
        self.later.append(gradient)
        return gradient


@dataclass
class WholeParameters:
    """Gives modules the whole of each sharded parameter; it is gathered at its first read in each forward of the root."""

    sharding: Sharding
    twins: Mapping[str, torch.Tensor]
    """The fake twin of each parameter, by FQN: a DTensor where the parameter is one."""
    stored: Mapping[str, torch.Tensor]
    """The twin of each parameter's local part, with padding, by FQN."""
    namer: NodeNamer
    paused: Callable[[], bool]
    is_gradient: Callable[[str, torch.Tensor], None]
    """Told of each gradient that is reduced outside of autograd's nodes, so that what is made of it is named."""
    now: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that are gathered at present, by FQN."""
    first: dict[tuple[str, bool], FirstGather] = field(default_factory=dict)
    """By FQN and whether it has a gradient."""
    waiting_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients that wait, not reduced, to be summed with those of a later backward, by FQN."""
    ending: set[int] = field(default_factory=set)
    """Roots that have a part in the backward that runs."""
    to_run: set[str] = field(default_factory=set)
    """Modules of units that run, by FQN, which have not ended in this forward."""
    busy: bool = False
    """Whether a gather is being recorded, which itself reads the parameter: that read must give the shard."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While inside, modules compute as under FSDP or DDP, by operators of the graph alone."""
        model, travelling = self.sharding.model, self.sharding.travelling
        with ExitStack() as inside:
            # FSDP's hooks gather by c10d in place, which the recorder refuses: their work is done by the hooks below.
            for module in model.modules():
                for table, number in list(own_hooks(module)):
                    inside.callback(table.update, dict(table))
                    del table[number]
            names = {id(module): fqn for fqn, module in model.named_modules()}
            for unit in self.sharding.units:
                fqns = [names[id(module)] for module in unit.modules]
                inside.enter_context(self._inputs_apart(unit, fqns))
                inside.enter_context(inputs_cast(model, fqns, unit.input_dtype, self.namer))
                inside.enter_context(outputs_cast(model, fqns, unit.output_dtype, self.namer))
                if unit.is_root:
                    root = unit.modules[0]
                    inside.callback(root.register_forward_pre_hook(lambda *_: self.forget(), prepend=True).remove)
            for module in self.sharding.replicas.values():
                under_ddp(model, module, self.twins, inside)
            if self.sharding.averaged is not None:
                rest = [fqn for fqn in self.twins if fqn not in travelling]
                averaged(rest, self.sharding.averaged, lambda fqn: [fqn], self.twins, inside)
            own = {id(self.twins[fqn]): fqn for fqn in travelling}
            inside.enter_context(read_by(model, own, self.read, self._is_read))
            yield

    @contextmanager
    def _inputs_apart(self, unit: Unit, fqns: Sequence[str]) -> Iterator[None]:
        """While inside, gradients of a value that ``unit`` reads are summed in it before those from elsewhere are added.

        So FSDP2 has it, by the autograd node at which it knows that the unit's backward is over.
        """

        def before(fqn: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
            # Of modules that are one unit only the first that runs is asked.
            is_first = self.to_run.isdisjoint(fqns)
            self.to_run.update(fqns if is_first else ())
            found = [one for one in tensors_within((args, kwargs)) if one.requires_grad]
            if not (is_first and found and torch.is_grad_enabled()):
                return None
            with self.namer.inside(fqn):
                given = iter(together(found))
            return each_tensor(lambda one: next(given) if one.requires_grad else one, (args, kwargs))

        with ExitStack() as hooks:
            for fqn, module in zip(fqns if unit.shards else (), unit.modules, strict=False):
                handle = module.register_forward_pre_hook(partial(before, fqn), prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
                left = module.register_forward_hook(lambda *_, fqn=fqn: self.to_run.discard(fqn), always_call=True)
                hooks.callback(left.remove)
            yield

    def refuse_kept(self) -> None:
        """Raise :class:`CaptureError` for gradients that the step leaves to a later one."""
        if fqn := next(iter(self.waiting_gradients), None):
            raise CaptureError(
                f"the gradient of {fqn} is not reduced when the step ends, by set_requires_gradient_sync(False); let the last "
                "backward of each step reduce it"
            )

    def forget(self) -> None:
        """Have parameters gathered anew at their next read."""
        self.now.clear()

    def read(self, fqn: str) -> torch.Tensor:
        """The whole parameter ``fqn``, as forward reads it."""
        if fqn not in self.now:
            # With gradients, even if the first reader is under no_grad: later readers get the same tensor, and may need them.
            self.busy = True
            try:
                with self.namer.inside(fqn.rpartition(".")[0]), torch.inference_mode(False), torch.enable_grad():
                    self.now[fqn] = self._gathered(self.sharding.travelling[fqn])
            finally:
                self.busy = False
        return self.now[fqn]

    def _gathered(self, one: GatheredParameter) -> torch.Tensor:
        """The whole parameter; in backward its gradient is reduced to one that is sharded as the parameter is."""
        fqn, inner = one.travel.fqn, one.shard.inner
        parameter, stored = self.twins[fqn], self.stored[fqn]

        # The argument is there for autograd alone. What is gathered is the local part with its padding.
        def gathered(_: torch.Tensor) -> torch.Tensor:
            return of_local(one.travel.gather(stored), inner)

        # FSDP2 has one leaf for all forwards, so a backward adds their gradients before it reduces.
        key = fqn, parameter.requires_grad
        if (first := self.first.get(key)) is not None:
            return with_gradient(first.whole, gathered, first.take)
        later: list[torch.Tensor] = []
        first = FirstGather(with_gradient(parameter, gathered, lambda gradient: self._reduced(one, gradient, later)), later)
        self.first[key] = first
        return first.whole

    def _reduced(self, one: GatheredParameter, gradient: torch.Tensor, later: list[torch.Tensor]) -> torch.Tensor | None:
        """The parameter's gradient of the whole one's; ``later`` are parts of that which came from later forwards."""
        fqn, inner = one.travel.fqn, one.shard.inner
        if one.root not in self.ending:
            self.ending.add(one.root)
            at_end_of_backward(partial(self._reduce_rest, one.root))
        is_of_several = bool(later) and (len(later) > 1 or later[0] is not gradient)
        later.clear()
        if one.shard.is_reduced and is_of_several and fqn in self.waiting_gradients:
            raise CaptureError(
                f"the gradient of {fqn} waits, not reduced, for a backward of several forwards, in which FSDP2 reduces it by "
                "itself; go backward behind each forward"
            )
        # First gradients of earlier backwards that were not reduced are added. If this one does not reduce either, the sum
        # waits. Else it is summed over the other dimensions of the mesh, such as tp, then reduced, and loses its padding.
        if inner is not None:
            gradient = gradient.to(one.shard.summed_in or gradient.dtype)
        if (before := self.waiting_gradients.pop(fqn, None)) is not None or not one.shard.is_reduced:
            gradient = one.travel.unreduced(gradient, before)
        if not one.shard.is_reduced:
            self.waiting_gradients[fqn] = gradient
            return None
        return self._to_shard(one, gradient)

    def _to_shard(self, one: GatheredParameter, gradient: torch.Tensor) -> torch.Tensor:
        """The parameter's gradient of the whole one's, which is the sum of all that waited."""
        fqn, inner = one.travel.fqn, one.shard.inner
        parameter, stored = self.twins[fqn], self.stored[fqn]
        gradient = one.travel.unreduced(placed_as(gradient, inner) if inner is not None else gradient)
        reduced = one.travel.reduce(gradient, stored.shape).to(stored.dtype)
        rows = local_of(parameter).shape
        if reduced.shape != rows:  # a copy, since a later backward adds to it in place, which a view would make a scatter
            reduced = reduced.narrow(0, 0, rows[0]).clone()
        return of_local(reduced, spec_of(parameter))

    def _reduce_rest(self, root: int) -> None:
        """At the end of a backward FSDP2 also reduces what waits of units that had no part in it."""
        self.ending.discard(root)
        self.to_run.clear()
        for fqn, one in self.sharding.travelling.items():
            if one.root != root or fqn not in self.waiting_gradients or not one.shard.is_reduced:
                continue
            waiting, parameter = self.waiting_gradients.pop(fqn), self.twins[fqn]
            self.is_gradient(fqn, waiting)
            with torch.no_grad():
                gradient = self._to_shard(one, waiting)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            for hook in hooks_behind_gradient(parameter):
                hook(parameter)

    def _is_read(self) -> bool:
        """Whether a read at this moment is by a module in its forward, and so is to give the gathered parameter."""
        return self.namer.is_in_module and not self.busy and not self.paused()
