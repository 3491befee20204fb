"""Models that the user has already put under ``fully_shard``, DDP or ``parallelize_module``, captured as they are.

While the step is traced, FSDP's hooks and DDP's own forward are removed. In their place the graph gathers each parameter that
forward reads, where FSDP's hooks would, and reduces gradients as torch does. All other operators on DTensors, such as those of
tensor parallelism and of gradient clipping, are recorded as the operators on local tensors that DTensor makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.backward import with_gradient
from pytest_fxbucket.capture.model import forward_instead
from pytest_fxbucket.capture.names import NodeNamer, inputs_cast, outputs_cast
from pytest_fxbucket.capture.parallel.modes import ParallelMode, Sharded
from pytest_fxbucket.capture.parallel.unshard import ParameterTravel, read_by
from pytest_fxbucket.compat.c10d import collective
from pytest_fxbucket.compat.dtensors import local_of, of_local, placed_as, spec_of
from pytest_fxbucket.compat.fake_tensors import unwatched
from pytest_fxbucket.compat.fsdp import Ranks, Shard, Unit, own_hooks, units_of
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.mesh import Group


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
        for unit in found.units:
            for shard in unit.shards:
                fqn = fqns[id(shard.parameter)]
                travel = ParameterTravel(
                    _mode(unit, shard), shard.shape, unit.param_dtype, unit.reduce_dtype, fqn, "fully_shard"
                )
                found.travelling[fqn] = GatheredParameter(travel, shard)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                found._replicated(name, module)
        return found

    def _replicated(self, name: str, module: nn.parallel.DistributedDataParallel) -> None:
        where = f"module {name}" if name else "the model"
        if module.broadcast_buffers and list(module.buffers()):
            raise CaptureError(
                f"{where} is under DDP, which sends the buffers of rank 0 to all before each forward, and a captured step does "
                "not; make it with broadcast_buffers=False"
            )
        if module._comm_hooks or module.mixed_precision is not None:
            what = "a comm hook" if module._comm_hooks else "mixed precision"
            raise CaptureError(f"{where} is under DDP with {what}, which a captured step does not take over; leave it out")
        self.replicas[name] = module

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
    now: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that are gathered at present, by FQN."""
    first: dict[tuple[str, bool], FirstGather] = field(default_factory=dict)
    """By FQN and whether it has a gradient."""
    waiting_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients that wait, not reduced, to be summed with those of a later backward, by FQN."""
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
                inside.enter_context(inputs_cast(model, fqns, unit.input_dtype, self.namer))
                inside.enter_context(outputs_cast(model, fqns, unit.output_dtype, self.namer))
                if unit.is_root:
                    root = unit.modules[0]
                    inside.callback(root.register_forward_pre_hook(lambda *_: self.forget(), prepend=True).remove)
            for fqn, module in self.sharding.replicas.items():
                self._under_ddp(fqn, module, inside)
            if self.sharding.averaged is not None:
                rest = [fqn for fqn in self.twins if fqn not in travelling]
                self._average(rest, *self.sharding.averaged, lambda _: True, inside)
            own = {id(self.twins[fqn]): fqn for fqn in travelling}
            inside.enter_context(read_by(model, own, self.read, self._is_read))
            yield

    def _under_ddp(self, name: str, module: nn.Module, inside: ExitStack) -> None:
        """Have ``module`` call the module that it wraps, and gradients averaged unless it is called in ``no_sync()``."""
        # As in DDP, a forward with gradients decides whether the backward after it reduces: once, and all it has been given.
        replica: Any = module
        synced, reduced = [False], set[str]()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                if replica.require_backward_grad_sync:
                    synced[0] = True
                    reduced.clear()
                elif reduced:
                    synced[0] = False
            return replica.module(*args, **kwargs)

        def reduces(fqn: str) -> bool:
            if not synced[0] or fqn in reduced:
                return False
            reduced.add(fqn)
            return True

        inside.enter_context(forward_instead(module, forward))
        # By their first names, since another module may have them, too.
        first = {id(parameter): fqn for fqn, parameter in self.sharding.model.named_parameters()}
        own = replica.module.named_parameters()
        fqns = [first[id(parameter)] for inner, parameter in own if inner not in replica.parameters_to_ignore]
        group = replica.process_group
        self._average(fqns, group.group_name, group.size(), reduces, inside)

    def _average(self, fqns: Sequence[str], group: str, size: int, reduces: Callable[[str], bool], inside: ExitStack) -> None:
        """Have each gradient averaged once it is accumulated, as DDP does: divided by the number of ranks, then summed."""

        # Unwatched below, since the read of .grad in here is none of the step's.
        def average(fqn: str, parameter: torch.Tensor) -> None:
            if reduces(fqn) and parameter.grad is not None and size > 1:
                gradient = local_of(parameter.grad)
                with torch.no_grad():
                    gradient.copy_(collective("all_reduce", gradient / size, "sum", group))

        for fqn in fqns:
            twin = self.twins[fqn]
            if twin.requires_grad:
                handle = twin.register_post_accumulate_grad_hook(unwatched(partial(average, fqn)))
                inside.callback(handle.remove)

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
        parameter, stored = self.twins[fqn], self.stored[fqn]
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
        gradient = one.travel.unreduced(placed_as(gradient, inner) if inner is not None else gradient)
        reduced = one.travel.reduce(gradient, stored.shape).to(stored.dtype)
        rows = local_of(parameter).shape
        if reduced.shape != rows:  # a copy, since a later backward adds to it in place, which a view would make a scatter
            reduced = reduced.narrow(0, 0, rows[0]).clone()
        return of_local(reduced, spec_of(parameter))

    def _is_read(self) -> bool:
        """Whether a read at this moment is by a module in its forward, and so is to give the gathered parameter."""
        return self.namer.is_in_module and not self.busy and not self.paused()
