"""How a model calls its layers and what these do, at full depth without tracing it: each once, in order, from the one before.

Forward and loss run on fake tensors, every layer is really called, and each operator is noted with its arguments. So what is
done in one layer alone or for it (by its number, wherever it is kept; by a tap, a scale, a skip of the parent), deep where no
template reaches, is seen at a fraction of a trace's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.pictures import Pictures
from pytest_fxbucket.capture.repeat.backward import Operators, backward_of, refuse_irregular_backward
from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.capture.repeat.layers import Run
from pytest_fxbucket.capture.repeat.results import Results, tensors_in
from pytest_fxbucket.capture.repeat.sweeps import MIDDLE, source_of
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.children import children_of
from pytest_fxbucket.compat.dispatch import TorchDispatchMode
from pytest_fxbucket.compat.fake_tensors import FakeTensor

Happened = tuple[object, object]
"""What was called, and its arguments. A tensor is where it comes from, seen from here: ("before", 0, which of the tensors),
("unit", units from there to here, which) or ("held" | "given", 0, name); and shape, strides, dtype, requires_grad."""


@dataclass(slots=True)
class _Part:
    """What happens from the call of a unit's first layer until the next unit's: calls and operators, in order."""

    happened: list[Happened] = field(default_factory=list)
    made: int = 0
    called: int = 0
    """How many of the unit's layers."""


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records who is called with what while it is on; :meth:`watching` lets layers report."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self.parts = [_Part()]
        """What comes before the first unit, then one part a unit."""
        self._sources: dict[int, tuple[str, int, object, torch.Tensor]] = {}
        self._pictures = Pictures()
        self._inside = False
        self._given = 0
        self._gave: dict[int, Results] = {}
        self.backward: Operators = []
        for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
            unit = run.unit_of(fqn)
            name = run.renamed(fqn, -(unit or 0), -run.units)
            self._sources[id(tensor)] = ("held", 0, name, tensor) if unit is None else ("unit", unit, name, tensor)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """In the block all layers of the run report their calls."""
        container = children_of(model.get_submodule(self.run.container))
        layers = [layer for i in range(self.run.start, self.run.stop) if (layer := container[str(i)]) is not None]
        before = [{name: value for name, value in vars(layer).items() if name == "forward"} for layer in layers]
        try:
            for i, layer in enumerate(layers):
                layer.forward = _Stub(self, i, layer.forward)
            with self:
                yield
        finally:
            for layer, own in zip(layers, before, strict=True):
                vars(layer).pop("forward", None)
                vars(layer).update(own)

    def call(self, i: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Layer ``i`` of the run is called."""
        if self._inside:
            raise NotAlike(f"a layer of {self.run} calls another")
        unit, place = divmod(i, self.run.period)
        if place == 0:
            self.parts.append(_Part())
        part = self.parts[-1]
        if (len(self.parts) - 2, place) != (unit, part.called):
            raise NotAlike(f"layer {self.run.start + i} of {self.run} is not called once and in its turn")
        part.called += 1
        self._note(("layer", place), (args, kwargs))
        self._inside = True
        try:
            outputs = forward(*args, **kwargs)
        finally:
            self._inside = False
        self._note(("end of layer", place), outputs)
        return outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator is called."""
        if func.namespace == "prim":  # which device a tensor is on, asked for more often than all else
            tensor = args[0]
            return tensor.fake_device if type(tensor) is FakeTensor and func is DEVICE else func(*args, **(kwargs or {}))
        self._note(func, (args, kwargs) if kwargs else args)
        result = self._result(func, args, kwargs)
        self._keep(result)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` gives; made after what it gave in the unit that the others are compared with, if it gets the same."""
        happened = self.parts[-1].happened
        unit, at = len(self.parts) - 2, len(happened) - 1
        if unit > MIDDLE and at in self._gave and happened[at] == self.parts[MIDDLE + 1].happened[at]:
            return self._gave[at].again(tensors_in(args, kwargs))
        result = func(*args, **(kwargs or {}))
        if unit == MIDDLE and (gave := Results(tensors_in(args, kwargs), result)).known:
            self._gave[at] = gave
        return result

    def tensors(self) -> list[torch.Tensor]:
        """All that were seen."""
        return [tensor for *_, tensor in self._sources.values()]

    def _note(self, called: object, arguments: Any) -> None:
        self.parts[-1].happened.append((called, self._described(arguments)))

    def _described(self, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) in (tuple, list):
            return (type(value), *(self._described(item) for item in value))
        leaves, spec = pytree.tree_flatten(value) if not isinstance(value, _LEAVES) else ([value], None)
        if spec is None or (len(leaves) == 1 and leaves[0] is value):
            return self._pictures.of(value)
        return (str(spec), *(self._described(leaf) for leaf in leaves))

    def _tensor(self, tensor: torch.Tensor) -> object:
        found = self._sources.get(id(tensor))
        if found is None:
            found = self._sources[id(tensor)] = ("given", 0, self._given, tensor)
            self._given += 1
        kind, unit, which, _ = found
        away = len(self.parts) - 2 - unit if kind == "unit" else 0
        return (kind, away, which, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def _keep(self, result: Any) -> None:
        part = self.parts[-1]
        unit = len(self.parts) - 2
        for leaf in result if type(result) in (tuple, list) else (result,):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._sources:
                self._sources[id(leaf)] = ("before", 0, part.made, leaf) if unit < 0 else ("unit", unit, part.made, leaf)
                part.made += 1


DEVICE = torch.ops.prim.device.default
_LEAVES = (bool, int, float, str, type(None), torch.dtype, torch.device)


class _Stub:
    """A layer's forward that tells of its call."""

    def __init__(self, calls: Calls, i: int, forward: Callable[..., Any]) -> None:
        self.calls, self.i, self.forward = calls, i, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.calls.call(self.i, self.forward, args, kwargs)


def calls_of(model: nn.Module, run: Run, forward: Callable[[nn.Module], object]) -> Calls:
    """What happens when ``forward`` calls ``model``. Raises :class:`NotAlike` if not each layer is called once, in order."""
    calls = Calls(model, run)
    with calls.watching(model):
        loss = forward(model)
    if len(calls.parts) != run.units + 1:
        raise NotAlike(f"layer {run.start + (len(calls.parts) - 1) * run.period} of {run} is not called")
    calls.backward = backward_of(loss, model.parameters(), calls.tensors())
    return calls


def refuse_irregular(full: Calls, short: Calls) -> None:
    """Raise :class:`NotAlike` if units of ``full`` are not alike, or not those of ``short`` that are repeated for them."""
    units, template = full.run.units, short.run.units
    usual = _of(full, MIDDLE)
    for unit in range(MIDDLE + 1, units - MIDDLE):
        if (here := _of(full, unit)) != usual:
            layer = full.run.start + unit * full.run.period
            raise NotAlike(f"{full.run} is not called alike all along: {_first_change(here, usual)} at layer {layer}")
    for unit in range(-1, units):
        here, there = _of(full, unit), _of(short, source_of(unit, template, units))
        if here != there:
            where = {-1: "before the layers", units - 1: "at the last layer"}.get(unit, f"in unit {unit} of {full.run}")
            raise NotAlike(f"{_first_change(here, there)} {where} depends on how many layers there are")
    refuse_irregular_backward(full.backward, short.backward, units - template)


def _of(calls: Calls, unit: int) -> list[Happened]:
    return calls.parts[unit + 1].happened


def _first_change(here: list[Happened], there: list[Happened]) -> str:
    for (called, arguments), other in zip(here, there, strict=False):
        if (called, arguments) != other:
            return "the layer's call" if isinstance(called, tuple) else f"a call of {called}"
    return f"{max(len(here), len(there)) - min(len(here), len(there))} more or fewer operators"
