"""Python state that a forward may change: a graph does not change it again, so the change must make no difference.

State is compared by pictures. A picture is plain data; two are equal exactly if the two values hold the same.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import fx, nn

from pytest_fxbucket.capture.names import calls_watched
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.portable import digest, encode_module

_PLAIN = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, Enum, type)
_SINGLE = (torch.Tensor, nn.Module, torch.optim.Optimizer, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
GENERATOR = "a random generator"
"""First item of the picture of a random generator of Python or numpy."""
DEEP = 8
"""How many levels of objects within objects a picture looks into."""
MANY = 1_000
"""Class attributes and variables of the user that hold more items than that are not looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class ByIdentity:
    """Picture of an object by its identity alone. It keeps the object alive, so that no other gets that identity."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Snapshots:
    """Pictures of one moment: an object that several others hold is looked into once."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[object, object]] = {}

    def of(self, value: Any, depth: int = 0) -> object:
        """Picture of ``value``: tensors, modules and functions are themselves alone, other objects what they hold."""
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if isinstance(value, (float, complex)):
            return (type(value), repr(value))  # nan is like nan
        if isinstance(value, random.Random):
            return (GENERATOR, value.getstate())
        if type(value).__module__.startswith("numpy.random"):
            bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
            return (GENERATOR, repr(getattr(bits, "state", None)))
        if isinstance(value, _SINGLE) or depth > DEEP:
            return ByIdentity(value)
        if id(value) not in self._of:
            # For as long as it is looked into: an object that holds itself ends here.
            self._of[id(value)] = (value, "a part of itself")
            self._of[id(value)] = (value, self._inside(value, depth + 1))
        return self._of[id(value)][1]

    def _inside(self, value: Any, depth: int) -> object:
        if isinstance(value, (list, tuple)):
            return (type(value), tuple(self.of(item, depth) for item in value))
        if isinstance(value, dict):
            return (type(value), tuple((self.of(key, depth), self.of(item, depth)) for key, item in value.items()))
        if isinstance(value, (set, frozenset)):
            # In no order, and each as often as it is there: two members may look alike.
            return (type(value), frozenset(Counter(self.of(item, depth) for item in value).items()))
        if isinstance(value, partial):
            return (partial, self.of(value.func, depth), self.of(value.args, depth), self.of(value.keywords, depth))
        held = attributes_of(value)
        if not held:
            return ByIdentity(value)
        return (type(value), tuple((name, self.of(item, depth)) for name, item in held.items()))


def attributes_of(value: object) -> dict[str, Any]:
    """The object's own attributes, in slots or not."""
    listed = [cls.__dict__.get("__slots__", ()) for cls in type(value).__mro__]
    slots = [name for names in listed for name in ((names,) if isinstance(names, str) else names)]
    found = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


@cache
def _is_torchs(name: str) -> bool:
    """Whether ``name`` is a module's table of parameters, buffers, children or hooks, whose numbers no two modules share."""
    return name in ("_parameters", "_buffers", "_modules") or (name.startswith("_") and "_hooks" in name)


def state_of(model: nn.Module) -> dict[str, object]:
    """Picture of all Python state that forward might change, by where it lies.

    Attributes of the modules; attributes of their classes and variables of those classes' Python modules, as far as they are
    plain values or small collections; the state of Python's and numpy's random generators.
    """
    pictures = Snapshots()
    state: dict[str, object] = generators()
    for fqn, module in model.named_modules():
        where = f"module {fqn}" if fqn else "the root module"
        own = ((name, value) for name, value in vars(module).items() if not _is_torchs(name))
        state.update((f"attribute {name} of {where}", pictures.of(value)) for name, value in own)
    classes = {
        cls
        for module in model.modules()
        for cls in type(module).__mro__
        if cls.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "abc")
    }
    for cls in sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)):
        state.update((f"class attribute {cls.__name__}.{name}", pictures.of(v)) for name, v in vars(cls).items() if _small(v))
    for name in sorted({cls.__module__ for cls in classes}):
        variables = vars(sys.modules[name]).items() if name in sys.modules else ()
        state.update((f"variable {key} of {name}", pictures.of(v)) for key, v in variables if _small(v))
    return state


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Where two pictures of state differ: what is new, gone, or another."""
    return [where for where in {**before, **after} if before.get(where) != after.get(where)]


def generators() -> dict[str, object]:
    """State of the random generators that all code of the process shares, by name. torch's own is not among them."""
    found: dict[str, object] = {"Python's random generator": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found["numpy's random generator"] = repr(numpy.get_state(legacy=False))
    return found


def is_number(picture: object) -> bool:
    """Whether ``picture`` is of a number."""
    return isinstance(picture, tuple) and picture[0] in (bool, int, float)


def _small(value: object) -> bool:
    return isinstance(value, (int, float, str, bool)) or (isinstance(value, (list, dict, set)) and len(value) <= MANY)


# A step whose forward changes Python state is traced twice.


StepT = TypeVar("StepT")


def trace_settled(
    model: nn.Module, trace: Callable[[], tuple[StepT, fx.GraphModule]], run_alone: Callable[[StepT], None]
) -> tuple[StepT, fx.GraphModule]:
    """What ``trace`` gives; traced twice if forward changes attributes of ``model``, or variables of its Python modules.

    ``run_alone`` runs the model by itself, not traced. Raises :class:`CaptureError` if the second graph is another than the
    first, or a later one may be: for draws from generators of Python and numpy, and numbers that change from call to call.
    """
    before = state_of(model)
    first = trace()
    after = state_of(model)
    changed = changes(before, after)
    if not changed:
        return first
    _refuse_drawing(changed, after, model, partial(run_alone, first[0]))
    kept = (
        f"{changed[0]} is {'set' if changed[0] in after else 'deleted'} in forward and read in the next one, which a graph "
        "cannot do; keep it in a buffer that forward writes in place"
    )
    # State of one kind, as a cache that the first call fills, changes once and then stays. The second trace begins with what
    # the first left: an equal graph shows that nothing in it depends on that.
    try:
        second = trace()
    except CaptureError as error:
        raise CaptureError(f"{kept}: the second step cannot be traced, since {error}") from error
    later = state_of(model)
    for where in changed:
        # A number that still changes is refused even if both graphs are equal: it may make a difference at a later value.
        if is_number(after.get(where)) and later.get(where) != after[where]:
            raise CaptureError(
                f"{where} changes from call to call in forward, and a graph would keep its first value; count in a buffer "
                "(register_buffer, and add_ in forward), or outside of forward"
            )
    if digest(encode_module(first[1])) != digest(encode_module(second[1])):
        raise CaptureError(f"{kept}: the second step is another one than the first")
    return first


def _refuse_drawing(changed: list[str], after: dict[str, object], model: nn.Module, run: Callable[[], object]) -> None:
    for where in changed:
        picture = after.get(where)
        if where in generators():
            fqn = _who_changes(where, model, run)
            raise CaptureError(
                f"{f'module {fqn}' if fqn else 'the root module or the loss'} draws from {where} in forward, and a graph would "
                "have the same number in every step; draw with torch (torch.rand, and torch.where instead of if)"
            )
        if isinstance(picture, tuple) and picture[0] is GENERATOR:
            raise CaptureError(
                f"{where} is a random generator that forward draws from, and a graph would have the same numbers in every "
                "step; draw with torch's own (torch.rand, and torch.where instead of if)"
            )


def _who_changes(where: str, model: nn.Module, run: Callable[[], object]) -> str:
    """FQN of the innermost module in whose forward the generator called ``where`` changes."""
    found: list[str] = []
    begun: list[object] = []

    def enter(_: str) -> None:
        begun.append(generators()[where])

    def leave(fqn: str) -> None:
        # Inner modules leave before outer ones, so the first that saw a change is the innermost.
        if begun.pop() != generators()[where] and not found:
            found.append(fqn)

    with calls_watched(model, enter, leave):
        run()
    return found[0] if found else ""
