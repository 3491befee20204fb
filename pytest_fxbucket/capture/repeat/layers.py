"""Finds layers that are built alike, and makes a model shorter by some of them for a while."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.pictures import Pictures, is_hooks, own_attributes
from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.compat.children import children_of, with_children

Treatment = Callable[[str], Hashable]
"""What the plan does to a module, by its FQN: equal for two modules that are treated alike."""

_CALLED = ("forward", "__call__")


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a container that are built alike, in units of ``period`` layers: 2 if every second layer is alike."""

    container: str
    """FQN of the ModuleList, ModuleDict or Sequential."""
    start: int
    """Index of the first layer."""
    units: int
    period: int

    @property
    def stop(self) -> int:
        """Index behind the last layer."""
        return self.start + self.units * self.period

    def with_units(self, units: int) -> Run:
        """The same run, longer or shorter."""
        return Run(self.container, self.start, units, self.period)

    def index_in(self, fqn: str) -> int | None:
        """Index in the container of the layer that ``fqn`` is, or lies in; None if it is elsewhere."""
        prefix = f"{self.container}." if self.container else ""
        index = fqn[len(prefix) :].partition(".")[0]
        return int(index) if fqn.startswith(prefix) and index.isdecimal() else None

    def unit_of(self, fqn: str) -> int | None:
        """Unit that ``fqn`` belongs to; None if it is elsewhere."""
        index = self.index_in(fqn)
        return None if index is None or not self.start <= index < self.stop else (index - self.start) // self.period

    def renamed(self, fqn: str, units: int, behind: int) -> str:
        """``fqn`` if its layer of the run moves by ``units``, or a layer behind the run by ``behind`` units."""
        index = self.index_in(fqn)
        if index is None or index < self.start:
            return fqn
        prefix = f"{self.container}." if self.container else ""
        _, dot, rest = fqn[len(prefix) :].partition(".")
        return f"{prefix}{index + (units if index < self.stop else behind) * self.period}{dot}{rest}"

    def __str__(self) -> str:
        return f"{self.container or 'the root module'}[{self.start}-{self.stop - 1}]"


def longest_run(model: nn.Module, period: int, treatment: Treatment | None = None) -> Run:
    """The run with the most layers. Raises :class:`NotAlike` if no two units that follow each other are alike."""
    best = Run("", 0, 0, period)
    for fqn, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        named = children_of(container)
        children = [child for child in named.values() if child is not None]
        if list(named) != [str(i) for i in range(len(children))]:
            continue
        prefix = f"{fqn}." if fqn else ""
        builds = [_build(child, f"{prefix}{i}", treatment) for i, child in enumerate(children)]
        start, units = _longest(builds, period)
        if units > best.units:
            best = Run(fqn, start, units, period)
    if best.units < 2:
        raise NotAlike("no container holds layers that are built alike")
    return best


def _longest(builds: Sequence[object], period: int) -> tuple[int, int]:
    """Start and length in units of the longest stretch in which each build equals the one ``period`` before."""
    best = (0, 0)
    start = 0
    for i in range(1, len(builds) + 1):
        if i < len(builds) and (i - start < period or builds[i] == builds[i - period]):
            continue
        best = max(best, (start, (i - start) // period), key=lambda found: found[1])
        start = max(start + 1, i - period + 1)
    return best


def _build(layer: nn.Module, fqn: str, treatment: Treatment | None) -> object:
    """All of ``layer`` but its plain attributes: classes, parameters, buffers, hooks, and what the plan does to each module."""
    numbers: dict[int, int] = {}
    pictures = Pictures()

    def tensors(held: Iterator[tuple[str, torch.Tensor]]) -> list[object]:
        return [(name, numbers.setdefault(id(t), len(numbers)), _tensor(t)) for name, t in held]

    found: list[object] = []
    for path, module in layer.named_modules(remove_duplicate=False):
        hooks = {name: tuple(pictures.of(hook) for hook in v.values()) for name, v in vars(module).items() if _hooked(name, v)}
        called = {name: pictures.of(vars(module).get(name)) for name in _CALLED}
        parameters = tensors(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = tensors(module.named_buffers(recurse=False, remove_duplicate=False))
        treated = treatment(f"{fqn}.{path}" if path else fqn) if treatment else None
        found.append((path, type(module), numbers.setdefault(id(module), len(numbers)), hooks, called, treated))
        found += [parameters, buffers]
    return found


def _hooked(name: str, value: Any) -> bool:
    return is_hooks(name) and isinstance(value, dict)


def _tensor(tensor: torch.Tensor) -> object:
    placed = repr(getattr(tensor, "placements", ""))
    return (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, placed)


def refuse_shared(model: nn.Module, run: Run) -> None:
    """Raise :class:`NotAlike` for a module, parameter or buffer of one layer that is held elsewhere too."""
    holders: dict[int, tuple[str, int | None]] = {}
    kinds: list[tuple[str, Iterator[tuple[str, Any]]]] = [
        ("module", model.named_modules(remove_duplicate=False)),
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ]
    for kind, held in kinds:
        for fqn, value in held:
            index = run.index_in(fqn)
            owner = index if index is not None and run.start <= index < run.stop else None
            first, other = holders.setdefault(id(value), (fqn, owner))
            if other != owner:
                raise NotAlike(f"{kind} {fqn} is the same as {first}")


def differing(model: nn.Module, run: Run) -> dict[type, set[str]]:
    """Attributes, by the class of their module, that are not the same in each unit: a layer's number, its window."""
    pictures = Pictures()
    layers = list(children_of(model.get_submodule(run.container)).values())[run.start : run.stop]
    found: dict[type, set[str]] = {}
    for i, layer in enumerate(layers[run.period :]):
        assert layer is not None
        for module, other in zip(layer.modules(), layers[i].modules(), strict=True):  # type: ignore[union-attr]
            here, there = own_attributes(module), own_attributes(other)
            for name in here.keys() | there.keys():
                if pictures.of(here.get(name, differing)) != pictures.of(there.get(name, differing)):
                    found.setdefault(type(module), set()).add(name)
    return found


@contextmanager
def reads_refused(model: nn.Module, run: Run, attributes: dict[type, set[str]]) -> Iterator[None]:
    """Raise :class:`NotAlike` behind the block if code in it read one of ``attributes`` of a layer of ``run``.

    The classes have properties of these names for the time being. What nobody reads cannot make layers differ.
    """
    names = {id(module): fqn for fqn, module in model.named_modules() if run.unit_of(fqn) is not None}
    read: list[tuple[str, str]] = []
    before = [(cls, name, vars(cls).get(name, _ABSENT)) for cls, found in attributes.items() for name in sorted(found)]
    for cls, name, _ in before:
        setattr(cls, name, _watched(name, getattr(cls, name, _ABSENT), names, read))
    try:
        yield
    finally:
        for cls, name, value in before:
            delattr(cls, name) if value is _ABSENT else setattr(cls, name, value)
    if read:
        raise NotAlike(f"module {read[0][0]} reads its attribute {read[0][1]}, which is not the same in every layer")


_ABSENT = object()


def _watched(name: str, default: object, names: dict[int, str], read: list[tuple[str, str]]) -> property:
    def get(module: nn.Module) -> Any:
        if id(module) in names:
            read.append((names[id(module)], name))
        value = vars(module).get(name, default)
        if value is _ABSENT:
            raise AttributeError(name)
        return value

    def put(module: nn.Module, value: Any) -> None:
        vars(module)[name] = value

    return property(get, put)


@contextmanager
def shortened(model: nn.Module, run: Run, units: int) -> Iterator[None]:
    """In the block ``model`` has only ``units`` units of ``run``: the first, and then what stands behind the run."""
    container = model.get_submodule(run.container)
    children = list(children_of(container).values())
    kept = children[: run.start + units * run.period] + children[run.stop :]
    with with_children(container, {str(i): child for i, child in enumerate(kept)}):
        yield
