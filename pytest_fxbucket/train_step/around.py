"""Python values around a captured step: what tracing bakes in, and what a step that changes it would not do again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.pictures import Pictures, held_by
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step.reading import Name, read_by

if TYPE_CHECKING:
    from pytest_fxbucket.train_step.live import Live


def around_of(function: Callable[..., Any], live: Live, also: Iterable[Callable[..., Any]] = ()) -> dict[Name, object]:
    """Pictures of attributes and hooks of modules, parameters and optimizers, and of what all these functions read."""
    pictures, found = Pictures(), dict[Name, object]()
    modules = dict(live.model.named_modules())
    for fqn, module in modules.items():
        whose = f"module {fqn}" if fqn else "the root module"
        found.update(((name, whose, 0), pictures.of(value)) for name, value in held_by(module).items())
    for fqn, parameter in live.params.items():
        held = {**vars(parameter), "_hooks": parameter._backward_hooks}
        held["_hooks_of_gradient"] = getattr(parameter, "_post_accumulate_grad_hooks", None)
        found.update(((name, f"parameter {fqn}", 0), pictures.of(value)) for name, value in held.items() if value)
    for i, optimizer in enumerate(live.optimizers):
        whose = f"the optimizer {type(optimizer).__name__}"
        found.update(((name, whose, i), pictures.of(value)) for name, value in held_by(optimizer).items())
    forwards = {type(module): MethodType(type(module).forward, module) for module in modules.values()}
    known = {id(module) for module in modules.values()} | {id(optimizer) for optimizer in live.optimizers}
    return found | read_by([function, *forwards.values(), *also], known)


def refuse_changed(before: Mapping[Name, object], after: Mapping[Name, object]) -> None:
    """Raise :class:`CaptureError` if ``after`` a trace something is another than ``before``."""
    for name, whose, number in (*before, *after):
        if before.get((name, whose, number)) != after.get((name, whose, number)):
            raise CaptureError(
                f"the step changes {name}{f' of {whose}' if whose else ''}, which a graph does not do again; return it, or "
                "keep it in a buffer"
            )
