"""Which modules overrides name, by FQN or by class, in plans and in Python; and what cannot stand beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_fxbucket.capture.override.asked import Override, Overrides, ask
from pytest_fxbucket.capture.override.live import fresh_key, know
from pytest_fxbucket.capture.parallel.forwards import modules_called
from pytest_fxbucket.errors import CaptureError, PlanError
from pytest_fxbucket.plan.factories import import_callable

if TYPE_CHECKING:
    from pytest_fxbucket.capture.parallel.forwards import Forwards
    from pytest_fxbucket.plan.schema import Override as OverrideTable
    from pytest_fxbucket.plan.schema import Plan

Found = dict[str, tuple[Override, str]]
"""By FQN the override, and who asked for it."""


def overrides_of(model: nn.Module, plan: Plan, forwards: Forwards) -> Overrides:
    """What ``plan`` overrides of ``model``, asked.

    Raises :class:`PlanError` for names that match nothing, twice, or beside another key; :class:`CaptureError` for what is no
    sub-graph.
    """
    found: Found = {}
    for number, table in enumerate(plan.override, 1):
        where = f"{plan.path}: " + (f"[[override]] {number}" if len(plan.override) > 1 else "[override]")
        for fqn in _named_in_plan(table, model, where):
            _add(found, fqn, _from_table(table, where), where, PlanError)
    _refuse_nested(found, PlanError)
    _refuse_beside(found, forwards)
    return _asked(model, found, lambda fqn: fqn)


def overrides_given(model: nn.Module, given: Mapping[Any, Any]) -> Overrides:
    """The same of what ``capture_step`` is given: FQNs or classes, each with "call", a callable or an :class:`Override`."""
    found: Found = {}
    for key, value in given.items():
        where = f"overrides[{key.__name__ if isinstance(key, type) else repr(key)}]"
        override = value if isinstance(value, Override) else Override(value)
        if override.by != "call" and not callable(override.by):
            raise CaptureError(f'{where} is {override.by!r}, expected "call", a callable(module) or an Override')
        for fqn in _named_in_python(key, model, where):
            _add(found, fqn, override, where, CaptureError)
    _refuse_nested(found, CaptureError)
    asked = _asked(model, found, fresh_key)
    for one in asked.of.values():
        know(one.key, one.module)
    return asked


def _asked(model: nn.Module, found: Found, key_of: Callable[[str], str]) -> Overrides:
    return Overrides(
        {fqn: ask(fqn, model.get_submodule(fqn), override, key_of(fqn), where) for fqn, (override, where) in found.items()}
    )


def _from_table(table: OverrideTable, where: str) -> Override:
    by: Any = table.by if table.by == "call" else import_callable(table.by, f"{where} by")
    output = import_callable(table.output, f"{where} output") if table.output else None
    return Override(by, table.args, output)


def _named_in_plan(table: OverrideTable, model: nn.Module, where: str) -> Sequence[str]:
    if table.type is None:
        return modules_called(table.module, model, f"{where} module")
    cls: Any = import_callable(table.type, f"{where} type")
    if not isinstance(cls, type):
        raise PlanError(f'{where} type: "{table.type}" is a {type(cls).__name__}, expected a class')
    return _of_class(cls, model, f"{where} type", PlanError)


def _named_in_python(key: Any, model: nn.Module, where: str) -> Sequence[str]:
    if isinstance(key, type):
        return _of_class(key, model, where, CaptureError)
    modules = [fqn for fqn, _ in model.named_modules() if fqn]
    if not isinstance(key, str):
        raise CaptureError(f"{where}: a key is the FQN of a module or a class, not a value of type {type(key).__name__}")
    if key not in modules:
        near = get_close_matches(key, modules, n=1)
        raise CaptureError(
            f"{where}: the model has no module {key!r}"
            + (f"; did you mean {near[0]!r}?" if near else f"; it has {_some(modules)}")
        )
    return [key]


def _of_class(cls: type, model: nn.Module, where: str, error: type[Exception]) -> list[str]:
    found = [fqn for fqn, module in model.named_modules() if isinstance(module, cls)]
    if "" in found:
        raise error(f"{where}: the whole model is of class {cls.__name__}; name a module within it")
    if not found:
        classes = sorted({type(module).__name__ for fqn, module in model.named_modules() if fqn})
        near = get_close_matches(cls.__name__, classes, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; its modules are of {_some(classes)}"
        raise error(f"{where}: no module of the model is of class {cls.__name__}{hint}")
    return found


def _add(found: Found, fqn: str, override: Override, where: str, error: type[Exception]) -> None:
    if fqn in found:
        raise error(f"{where}: {fqn} is overridden by {found[fqn][1].rpartition(': ')[2]} too; let one of them name it")
    found[fqn] = override, where


def _refuse_nested(found: Found, error: type[Exception]) -> None:
    for fqn, (_, where) in found.items():
        if outer := next((other for other in found if other != fqn and lies_in(fqn, other)), None):
            raise error(f"{where}: {fqn} lies in {outer}, which is overridden as a whole; name one of the two")


def _refuse_beside(found: Found, forwards: Forwards) -> None:
    """What else a plan does to a module's forward has no place in one that is not traced."""
    for fqn, (_, where) in found.items():
        for key, modules in (("tp_plan", forwards.parted), ("ep_plan", forwards.experts)):
            if other := next((one for one in modules if lies_in(one, fqn) or lies_in(fqn, one)), None):
                whose = "it" if other == fqn else other
                raise PlanError(
                    f"{where}: {fqn} is overridden, and [parallel] {key} parts {whose}, which happens where a module is "
                    "traced; "
                    "leave one of them out"
                )
        if inner := next((one for one in forwards.recomputed if one != fqn and lies_in(one, fqn)), None):
            raise PlanError(
                f"{where}: {fqn} is overridden as a whole, so [step] checkpoint cannot compute {inner} in it again; leave "
                f"{inner} out of it"
            )


def lies_in(fqn: str, module: str) -> bool:
    """Whether ``fqn`` is ``module``, or a module within it."""
    return fqn == module or fqn.startswith(f"{module}.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
