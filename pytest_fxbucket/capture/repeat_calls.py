"""How a model calls its layers, seen at full depth without tracing them: each once, in order, from the one before.

Forward and loss run on fake tensors; the first layers are really called, the others give copies of what those gave. So what a
parent does for one layer alone (a tap, a scale, a skip), deep where no template reaches, is seen in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.pictures import Pictures
from pytest_fxbucket.capture.repeat_errors import NotAlike
from pytest_fxbucket.capture.repeat_layers import Run
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.children import children_of
from pytest_fxbucket.compat.dispatch import TorchDispatchMode

Source = tuple[str, int, object]
"""Where a tensor comes from: ("before" | "unit", number of the unit, which of its tensors) or ("held" | "given", 0, name)."""


@dataclass(slots=True)
class _Part:
    """What happens from the call of a unit's first layer until the next unit's: calls and operators, in order."""

    happened: list[tuple[object, list[object]]] = field(default_factory=list)
    """What was called, and its arguments: (Source of a tensor, description) or the picture of a plain value."""
    made: int = 0


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records who is called with what while it is on; :meth:`watching` lets layers report."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self.parts = [_Part()]
        """What comes before the first unit, then one part a unit."""
        self._sources: dict[int, tuple[Source, torch.Tensor]] = {}
        self._pictures = Pictures()
        self._inside = False
        self._given = 0
        self._gave: dict[int, Any] = {}
        for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
            unit = run.unit_of(fqn)
            name = run.renamed(fqn, -(unit or 0), -run.units)
            self._sources[id(tensor)] = (("held", 0, name) if unit is None else ("unit", unit, name), tensor)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """In the block all layers of the run report their calls, and all but those of the first unit are not really called."""
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
        if (len(self.parts) - 2, place) != (unit, self._calls_in_part()):
            raise NotAlike(f"layer {self.run.start + i} of {self.run} is not called once and in its turn")
        self._note(("layer", place), (args, kwargs))
        self._inside = True
        try:
            outputs = self._first(place, forward, args, kwargs) if unit == 0 else self._like(place, (args, kwargs))
        finally:
            self._inside = False
        self._keep(outputs)
        return outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator is called."""
        result = func(*args, **(kwargs or {}))
        if not self._inside and func.namespace != "prim":  # which device a tensor is on
            self._note(str(func), (args, kwargs or {}))
            self._keep(result)
        return result

    def _calls_in_part(self) -> int:
        return sum(isinstance(called, tuple) for called, _ in self.parts[-1].happened)

    def _first(self, place: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        inputs = {id(leaf): i for i, leaf in enumerate(pytree.tree_leaves((args, kwargs)))}
        leaves, spec = pytree.tree_flatten(outputs)
        self._gave[place] = (
            [inputs.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None for leaf in leaves],
            leaves,
            spec,
        )
        return outputs

    def _like(self, place: int, arguments: Any) -> Any:
        """New tensors, as the layer at ``place`` of the first unit gave them; what it handed through is handed through."""
        inputs = pytree.tree_leaves(arguments)
        through, leaves, spec = self._gave[place]
        made = [
            inputs[i] if i is not None else _new(leaf) if isinstance(leaf, torch.Tensor) else leaf
            for i, leaf in zip(through, leaves, strict=True)
        ]
        return pytree.tree_unflatten(made, spec)

    def _note(self, called: object, arguments: Any) -> None:
        leaves, spec = pytree.tree_flatten(arguments)
        self.parts[-1].happened.append((called, [str(spec), *(self._described(leaf) for leaf in leaves)]))

    def _described(self, leaf: Any) -> object:
        if not isinstance(leaf, torch.Tensor):
            return self._pictures.of(leaf)
        if id(leaf) not in self._sources:
            self._sources[id(leaf)] = (("given", 0, self._given), leaf)
            self._given += 1
        source, _ = self._sources[id(leaf)]
        return (source, tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)

    def _keep(self, result: Any) -> None:
        part = self.parts[-1]
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._sources:
                unit = len(self.parts) - 2
                self._sources[id(leaf)] = ((("before", 0, part.made) if unit < 0 else ("unit", unit, part.made)), leaf)
                part.made += 1


class _Stub:
    """A layer's forward that tells of its call."""

    def __init__(self, calls: Calls, i: int, forward: Callable[..., Any]) -> None:
        self.calls, self.i, self.forward = calls, i, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.calls.call(self.i, self.forward, args, kwargs)


def _new(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_().clone() if tensor.requires_grad else made


def calls_of(model: nn.Module, run: Run, forward: Callable[[nn.Module], object]) -> Calls:
    """What happens when ``forward`` calls ``model``. Raises :class:`NotAlike` if not each layer is called once, in order."""
    calls = Calls(model, run)
    with calls.watching(model):
        forward(model)
    if len(calls.parts) != run.units + 1:
        raise NotAlike(f"layer {run.start + (len(calls.parts) - 1) * run.period} of {run} is not called")
    return calls


def refuse_irregular(full: Calls, short: Calls) -> None:
    """Raise :class:`NotAlike` if units of ``full`` are not called alike, or what is around them is not as in ``short``."""
    units = full.run.units
    usual = _seen_from(full, 1)
    for unit in range(2, units - 1):
        if (here := _seen_from(full, unit)) != usual:
            layer = full.run.start + unit * full.run.period
            raise NotAlike(f"{full.run} is not called alike all along: {_first_change(here, usual)} at layer {layer}")
    for where, part, other in (
        ("before the layers", _seen_from(full, -1), _seen_from(short, -1)),
        ("at the first layer", _seen_from(full, 0), _seen_from(short, 0)),
        ("at the last layer", _seen_from(full, units - 1), _seen_from(short, short.run.units - 1)),
    ):
        if part != other:
            raise NotAlike(f"{_first_change(part, other)} {where} depends on how many layers there are")


def _seen_from(calls: Calls, unit: int) -> list[tuple[object, list[object]]]:
    """A part with units as distances from it; those of tensors that are made before the layers stay as they are."""

    def seen(argument: object) -> object:
        match argument:
            case ((str() as kind, int() as number, which), *rest):
                return ((kind, unit - number if kind == "unit" else number, which), *rest)
        return argument

    return [(called, [seen(a) for a in arguments]) for called, arguments in calls.parts[unit + 1].happened]


def _first_change(here: list[tuple[object, list[object]]], there: list[tuple[object, list[object]]]) -> str:
    for (called, arguments), other in zip(here, there, strict=False):
        if (called, arguments) != other:
            return "the layer's call" if isinstance(called, tuple) else f"a call of {called}"
    return f"{max(len(here), len(there)) - min(len(here), len(there))} more or fewer operators"
