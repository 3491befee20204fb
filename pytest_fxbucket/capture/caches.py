"""Caches that a trace fills with fake tensors: behind it those of ``functools.lru_cache`` are emptied, and dicts are as before.

Models keep positions, masks and frequencies in such caches. What a trace leaves there would be met by the next trace, and by
the model itself, where nobody can compute with it. Dicts are looked for in the model's modules, in their classes, and in the
Python modules that these are written in.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from pytest_fxbucket.compat.tracing import is_fake

_Cache = functools._lru_cache_wrapper
_NOBODYS = ("torch", "sympy", "numpy", "mpmath")
"""Packages whose caches hold no tensors of models."""
_DEPTH = 4
"""From a cache to the tensors of its results: its table, an entry, a result, an item of that."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of what torch keeps in each module: parameters, buffers, hooks."""
_DICTS = (dict, OrderedDict, defaultdict)
"""Others may make what they are asked for."""
_known: dict[str, tuple[ModuleType, list[_Cache[Any]]]] = {}
"""Caches of each module that was looked at; a name may stand for another module later."""


@contextmanager
def without_fake_caches(model: nn.Module) -> Iterator[None]:
    """Behind the block, empty each cache that holds a fake tensor since: of functions, classes and parts of ``model``."""
    before = {id(one): one.cache_info().currsize for one in _caches(model)}
    dicts = [(one, dict(one)) for one in _dicts(model)]
    try:
        yield
    finally:
        for held, items in dicts:
            for key in [key for key in held if held[key] is not items.get(key) and _holds_fake([held[key]], _DEPTH)]:
                if key in items:
                    held[key] = items[key]
                else:
                    del held[key]
        for one in _caches(model):
            if one.cache_info().currsize != before.get(id(one), 0) and _holds_fake([one], _DEPTH):
                one.cache_clear()


def _caches(model: nn.Module) -> Iterator[_Cache[Any]]:
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] in _NOBODYS:
            continue
        if name not in _known or _known[name][0] is not module:
            _known[name] = module, list(_in_module(module))
        yield from _known[name][1]
    for part in model.modules():
        yield from _in_values(vars(part))


def _dicts(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Dicts that the model's own code may keep tensors in, each once."""
    found: dict[int, dict[Any, Any]] = {}
    places: dict[int, Mapping[str, Any]] = {}
    for part in model.modules():
        own = {name: value for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}
        found |= {id(value): value for value in own.values() if type(value) in _DICTS}
        for one in type(part).__mro__:
            if one.__module__.partition(".")[0] not in (*_NOBODYS, "builtins"):
                places |= {id(held): vars(held) for held in (one, sys.modules.get(one.__module__)) if held is not None}
    for place in places.values():
        found |= {id(value): value for name, value in place.items() if type(value) in _DICTS and name[:2] != "__"}
    yield from found.values()


def _in_module(module: ModuleType) -> Iterator[_Cache[Any]]:
    yield from _in_values(vars(module))
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from _in_values(vars(value))


def _in_values(held: Mapping[str, Any]) -> Iterator[_Cache[Any]]:
    """Caches among ``held``, and those that functions among them close over."""
    for value in list(held.values()):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        cells = value.__closure__ or () if isinstance(value, FunctionType) else ()
        for one in (value, *(cell.cell_contents for cell in cells if _is_filled(cell))):
            if isinstance(one, _Cache):
                yield one


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _holds_fake(held: Iterable[Any], depth: int) -> bool:
    for value in held:
        if is_fake(value):
            return True
        is_deeper = depth and not isinstance(value, (type, ModuleType, FunctionType, nn.Module))
        if is_deeper and _holds_fake(gc.get_referents(value), depth - 1):
            return True
    return False
