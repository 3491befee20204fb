"""What a function reads besides its arguments: variables that it closes over, globals, attributes that its code names."""

from __future__ import annotations

import dis
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.pictures import DEEP, MANY, Pictures, Very, attributes_of, held_by, is_plain

Name = tuple[str, str, int]
"""What it is called, whose it is ("" for the step's own), and a number that keeps apart what is called alike."""

_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(torch.__file__).parents[1])})
_OPAQUE = (torch.Tensor, torch.optim.Optimizer)
_COLLECTIONS = (list, tuple, set, frozenset, dict)
_NONE = object()


@dataclass(frozen=True, slots=True)
class _Names:
    """Names in a code object and in those inside it."""

    variables: tuple[str, ...]
    """Globals that it reads or sets."""
    attributes: tuple[str, ...]


def read_by(functions: Iterable[Callable[..., Any]], known: Collection[int]) -> dict[Name, object]:
    """Pictures of all values that ``functions`` read, and functions of the user's that they call by name.

    Plain values and small collections are what they hold, modules what they keep as attributes. Of another object (a bound
    method's own among them) the attributes that the code names count. Tensors, optimizers and objects whose identities are in
    ``known`` are themselves alone.
    """
    reading = _Reading(known)
    for function in functions:
        reading.function(function)
    return reading.found


class _Reading:
    def __init__(self, known: Collection[int]) -> None:
        self.found: dict[Name, object] = {}
        self._known = known
        self._pictures = Pictures()
        self._of_values: dict[tuple[int, tuple[str, ...]], object] = {}
        self._functions: dict[tuple[int, int], object] = {}
        """By identity of the code and of the object whose method it is; kept, so that no identity is given away again."""

    def function(self, function: Any) -> None:
        """Look through ``function``: plain, bound, partial, or an object that is called."""
        if isinstance(function, partial):
            self.found["the arguments", "the partial", len(self._functions)] = self._of(
                (function.args, function.keywords), (), 0
            )
            self.function(function.func)
        elif isinstance(function, MethodType):
            self._code(function.__func__, function.__self__)
        elif isinstance(function, FunctionType):
            self._code(function)
        elif callable(function):
            self._code(type(function).__call__, function)

    def _code(self, function: Any, owner: object = None) -> None:
        code = getattr(function, "__code__", None)
        key = (id(function), id(owner))
        if code is None or key in self._functions or code.co_filename.startswith(_LIBRARIES):
            return
        whose = str(function.__name__) if self._functions else ""
        number = len(self._functions)
        self._functions[key] = (function, owner)
        names = _names(code)
        for name, value in _variables(function, names):
            self.found[name, whose, number] = self._of(value, names.attributes, 0)
        if owner is not None:
            own = vars(owner) if id(owner) in self._known else ()
            for name, value in self._attributes(owner, names.attributes):
                if name not in own:
                    self.found[f"self.{name}", whose, number] = self._of(value, names.attributes, 0)

    def _of(self, value: Any, names: tuple[str, ...], depth: int) -> object:
        """Picture of ``value``, of which code reads the attributes ``names``."""
        if is_plain(value) and not isinstance(value, type):
            return self._pictures.of(value)
        if id(value) in self._known or isinstance(value, _OPAQUE) or _of_library(value) or depth > DEEP:
            return Very(value)
        key = id(value), names
        if key not in self._of_values:
            self._of_values[key] = "a part of itself"
            self._of_values[key] = self._inside(value, names, depth + 1)
        return self._of_values[key]

    def _inside(self, value: Any, names: tuple[str, ...], depth: int) -> object:
        if isinstance(value, _COLLECTIONS):
            return self._collection(value, names, depth)
        if isinstance(value, nn.Module):
            return tuple((fqn, Very(module), self._pictures.of(held_by(module))) for fqn, module in value.named_modules())
        if isinstance(value, (FunctionType, MethodType, partial)):
            self.function(value)
            return Very(value)
        return (Very(value), *((name, self._of(item, names, depth)) for name, item in self._attributes(value, names)))

    def _collection(self, value: Any, names: tuple[str, ...], depth: int) -> object:
        if len(value) > MANY:
            return Very(value)
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        pictures = [self._of(item, names, depth) for item in items]
        return (type(value), frozenset(pictures) if isinstance(value, (set, frozenset)) else tuple(pictures))

    def _attributes(self, owner: object, names: tuple[str, ...]) -> Iterator[tuple[str, object]]:
        """Those of the object's attributes that are named; methods of its class are looked through."""
        own = attributes_of(owner)
        for name in names:
            if name in own:
                yield name, own[name]
                continue
            found = next((vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)), None)
            if isinstance(found, (FunctionType, property)):
                self._code(found.fget if isinstance(found, property) else found, owner)
            elif found is not None and (is_plain(found) or isinstance(found, _COLLECTIONS)):
                yield name, found


def _variables(function: Any, names: _Names) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            yield name, _NONE
    for name in names.variables:
        yield name, function.__globals__.get(name, _NONE)


@lru_cache(maxsize=1_000)
def _names(code: CodeType) -> _Names:
    variables: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for inner in _codes(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
                variables[str(instruction.argval)] = None
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
                attributes[str(instruction.argval)] = None
    return _Names(tuple(variables), tuple(attributes))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _of_library(value: object) -> bool:
    """Whether it is a Python module or a class that is not the user's; what is there does not change."""
    if isinstance(value, ModuleType):
        return str(getattr(value, "__file__", None) or _LIBRARIES[0]).startswith(_LIBRARIES)
    return isinstance(value, type) and value.__module__.partition(".")[0] in ("torch", "builtins")
