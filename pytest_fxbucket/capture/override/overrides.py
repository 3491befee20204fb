"""Which modules of a model are overridden, and by what: named in plans or in Python, and asked before anything is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import nn

from pytest_fxbucket.capture.override.calls import fresh_key, know
from pytest_fxbucket.capture.parallel.forwards import Forwards, modules_called
from pytest_fxbucket.compat.tracing import is_fake
from pytest_fxbucket.errors import CaptureError, PlanError
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Override as OverrideTable
from pytest_fxbucket.plan.selectors import parameters_of, parse_entries
from pytest_fxbucket.user_frame import naming_user_frame
from pytest_fxbucket.words import some


@dataclass(frozen=True, slots=True)
class Override:
    """How one module is overridden in a captured step."""

    by: Literal["call"] | Callable[..., Any] = "call"
    """``"call"``: the real module is called when the graph runs. Else ``callable(module, **args)``, asked once for each module,
    which gives a :class:`Subgraph` or the ``forward`` of one."""
    args: Mapping[str, Any] = field(default_factory=dict)
    output: Callable[..., Any] | None = None
    """``callable(module, *args, **kwargs)`` gives what a call would, of fake tensors, for ``by = "call"``; left out: a tensor
    like the first that it is given."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """What is traced in an overridden module's place."""

    forward: Callable[..., Any]
    """``forward(tensors, *args, **kwargs)`` gives what the module's forward would. ``tensors`` has parameters and buffers by
    their names within the module, and state; a parameter that it does not read is neither gathered nor given a gradient. With
    state: ``(output, {name: new value})``."""
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """First values of what it keeps from call to call and from step to step, as ``<FQN>.<name>``; without gradients."""


@dataclass(frozen=True, slots=True)
class OverriddenModule:
    """One module that is overridden."""

    fqn: str
    module: nn.Module
    key: str
    """Under which graphs that run find the module."""
    where: str
    """Who asked for it, as errors begin."""
    output: Callable[..., Any] | None
    subgraph: Subgraph | None
    """None: the real module is called."""
    by: str = "call"
    """What gave the sub-graph, for people."""

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """First values of its state, by FQN."""
        return {f"{self.fqn}.{name}": tensor for name, tensor in (self.subgraph.state if self.subgraph else {}).items()}


@dataclass(frozen=True)
class Overrides:
    """All modules of a model that are overridden, by FQN."""

    of: Mapping[str, OverriddenModule] = field(default_factory=dict)
    idle: frozenset[str] | None = None
    """All FQNs, aliases too, of the parameters that a call may leave without a gradient; None: every parameter."""

    def __bool__(self) -> bool:
        return bool(self.of)

    def may_be_idle(self, fqn: str) -> bool:
        """Whether the parameter ``fqn`` has zeros where a call leaves it without a gradient."""
        return self.idle is None or fqn in self.idle

    @property
    def first_state(self) -> dict[str, torch.Tensor]:
        """First values of all state, by FQN."""
        return {name: tensor for one in self.of.values() for name, tensor in one.state.items()}

    def changes(self) -> Iterator[str]:
        """A clause for each module."""
        for fqn, one in self.of.items():
            yield f"{fqn} is overridden by {'a call of the real module' if one.subgraph is None else one.by}"


NONE = Overrides()


def overrides_of(model: nn.Module, plan: Plan, forwards: Forwards) -> Overrides:
    """What ``plan`` overrides of ``model``, asked.

    Raises :class:`PlanError` for names that match nothing, twice, or beside another key; :class:`CaptureError` for what is no
    sub-graph.
    """

    def listed() -> Iterator[tuple[str, Override, str]]:
        for number, table in enumerate(plan.override, 1):
            where = f"{plan.path}: " + (f"[[override]] {number}" if len(plan.override) > 1 else "[override]")
            fqns = _fqns_in_plan(table, model, where)
            by: Any = table.by if table.by == "call" else import_callable(table.by, f"{where} by")
            output = import_callable(table.output, f"{where} output") if table.output else None
            yield from ((fqn, Override(by, table.args, output), where) for fqn in fqns)

    named = _once_each(listed(), PlanError)
    _refuse_beside(named, forwards)
    return _overrides_of(model, named, lambda fqn: fqn)


def overrides_given(model: nn.Module, given: Mapping[Any, Any], may_be_idle: Sequence[str]) -> Overrides:
    """Overrides ``given`` to ``capture_step``: FQNs or classes, each with "call", a callable or an :class:`Override`.

    ``may_be_idle`` are entries of parameters that a call may leave without a gradient.
    """

    def listed() -> Iterator[tuple[str, Override, str]]:
        for key, value in given.items():
            where = f"overrides[{key.__name__ if isinstance(key, type) else repr(key)}]"
            override = value if isinstance(value, Override) else Override(value)
            if override.by != "call" and not callable(override.by):
                raise CaptureError(f'{where} is {override.by!r}, expected "call", a callable(module) or an Override')
            yield from ((fqn, override, where) for fqn in _fqns_in_python(key, model, where))

    asked = _overrides_of(model, _once_each(listed(), CaptureError), fresh_key)
    for one in asked.of.values():
        know(one.key, one.module)
    return replace(asked, idle=_idle(model, asked, may_be_idle))


def _idle(model: nn.Module, asked: Overrides, entries: Sequence[str]) -> frozenset[str]:
    """All FQNs of the parameters that ``entries`` name. Raises :class:`CaptureError` if no module that is called has one."""
    named = [(name, one) for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad]
    first = {id(one): name for name, one in reversed(named)}
    names = {name: first[id(one)] for name, one in named}
    modules = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    try:
        found = parameters_of(parse_entries(entries, "may_be_idle"), names, modules, "may_be_idle", "trainable parameters")
    except PlanError as error:
        raise CaptureError(str(error)) from None
    idle = frozenset(name for name, fqn in names.items() if fqn in found)
    called = [fqn for fqn, one in asked.of.items() if one.subgraph is None]
    if idle and not any(_lies_in(name, fqn) for name in idle for fqn in called):
        raise CaptureError(
            f'may_be_idle names {some(sorted(idle))}, of no module that is overridden by "call"; leave it out: what is traced '
            "has a gradient where eager has one"
        )
    return idle


_Named = dict[str, tuple[Override, str]]
"""By FQN the override of a module, and who asked for it."""


def _once_each(listed: Iterable[tuple[str, Override, str]], error: type[Exception]) -> _Named:
    """Modules that are to be overridden. Raises ``error`` for one that is named twice, or lies in another."""
    named: _Named = {}
    for fqn, override, where in listed:
        if fqn in named:
            other = named[fqn][1].rpartition(": ")[2]
            raise error(f"{where}: {fqn} is overridden by {other} too; let one of them name it")
        named[fqn] = override, where
    for fqn, (_, where) in named.items():
        if outer := next((other for other in named if other != fqn and _lies_in(fqn, other)), None):
            raise error(f"{where}: {fqn} lies in {outer}, which is overridden as a whole; name one of the two")
    return named


def _overrides_of(model: nn.Module, named: _Named, key_of: Callable[[str], str]) -> Overrides:
    asked = (_ask(fqn, model.get_submodule(fqn), override, key_of(fqn), where) for fqn, (override, where) in named.items())
    return Overrides({one.fqn: one for one in asked})


def _fqns_in_plan(table: OverrideTable, model: nn.Module, where: str) -> Sequence[str]:
    if table.type is None:
        return modules_called(table.module, model, f"{where} module")
    cls: Any = import_callable(table.type, f"{where} type")
    if not isinstance(cls, type):
        raise PlanError(f'{where} type: "{table.type}" is a {type(cls).__name__}, expected a class')
    return _of_class(cls, model, f"{where} type", PlanError)


def _fqns_in_python(key: Any, model: nn.Module, where: str) -> Sequence[str]:
    if isinstance(key, type):
        return _of_class(key, model, where, CaptureError)
    if not isinstance(key, str):
        raise CaptureError(f"{where}: a key is the FQN of a module or a class, not a value of type {type(key).__name__}")
    modules = [fqn for fqn, _ in model.named_modules() if fqn]
    if key not in modules:
        raise CaptureError(f"{where}: the model has no module {key!r}{_instead(key, modules, 'it has', repr)}")
    return [key]


def _of_class(cls: type, model: nn.Module, where: str, error: type[Exception]) -> list[str]:
    found = [fqn for fqn, module in model.named_modules() if isinstance(module, cls)]
    if "" in found:
        raise error(f"{where}: the whole model is of class {cls.__name__}; name a module within it")
    if not found:
        classes = sorted({type(module).__name__ for fqn, module in model.named_modules() if fqn})
        instead = _instead(cls.__name__, classes, "its modules are of", str)
        raise error(f"{where}: no module of the model is of class {cls.__name__}{instead}")
    return found


def _instead(name: str, known: Sequence[str], there_are: str, quoted: Callable[[str], str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {quoted(near[0])}?" if near else f"; {there_are} {some(known) or 'none'}"


def _refuse_beside(named: _Named, forwards: Forwards) -> None:
    """Raise :class:`PlanError` if the plan also parts, or checkpoints a part of, a module that is overridden."""
    for fqn, (_, where) in named.items():
        for key, modules in (("tp_plan", forwards.parted), ("ep_plan", forwards.experts)):
            if other := next((one for one in modules if _lies_in(one, fqn) or _lies_in(fqn, one)), None):
                raise PlanError(
                    f"{where}: {fqn} is overridden, and [parallel] {key} parts {'it' if other == fqn else other}, which "
                    "happens where a module is traced; leave one of them out"
                )
        if inner := next((one for one in forwards.recomputed if one != fqn and _lies_in(one, fqn)), None):
            raise PlanError(
                f"{where}: {fqn} is overridden as a whole, so [step] checkpoint cannot compute {inner} in it again; leave "
                f"{inner} out of it"
            )


def _lies_in(fqn: str, module: str) -> bool:
    return fqn == module or fqn.startswith(f"{module}.")


def _ask(fqn: str, module: nn.Module, override: Override, key: str, where: str) -> OverriddenModule:
    """Ask ``override`` for ``module``. Raises :class:`CaptureError`, beginning with ``where``, for what is no sub-graph."""
    if override.by == "call":
        return OverriddenModule(fqn, module, key, where, override.output, None)
    name = getattr(override.by, "__qualname__", type(override.by).__name__)
    with naming_user_frame(lambda: f"{where}: {name} of module {fqn}"):
        made = override.by(module, **override.args)
    if made is None:
        raise CaptureError(
            f"{where}: {name} gave nothing for module {fqn}, so its anchor would be left over; let it return the forward of a "
            'sub-graph, or use by = "call"'
        )
    subgraph = made if isinstance(made, Subgraph) else Subgraph(made)
    if not callable(subgraph.forward):
        kind = type(subgraph.forward).__name__
        raise CaptureError(f"{where}: {name} gave a value of type {kind} for module {fqn}, expected a function or a Subgraph")
    _refuse_wrong_state(fqn, module, subgraph, f"{where}: {name}")
    return OverriddenModule(fqn, module, key, where, None, subgraph, name)


def _refuse_wrong_state(fqn: str, module: nn.Module, subgraph: Subgraph, where: str) -> None:
    taken = {name for name, _ in (*module.named_parameters(), *module.named_buffers(), *module.named_modules())}
    for name, tensor in subgraph.state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"{where} gave state {name} of module {fqn} as a value of type {type(tensor).__name__}, expected a tensor"
            )
        if is_fake(tensor):
            raise CaptureError(
                f"{where} gave state {name} of module {fqn} without values: it is made of the module's own tensors, which have "
                "none while a plan is traced; make it of numbers, as torch.zeros does"
            )
        if name in taken or "." in name or not name:
            raise CaptureError(
                f"{where} calls state of module {fqn} {name!r}, which is {'taken' if name in taken else 'no name'}; give it "
                "one without dots that nothing in the module has"
            )
