"""The operators that there are: the functions of this package's files, and anybody's, as ``module:callable``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from inspect import getdoc, getmembers, isfunction

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.mutate import operators
from pytest_fxbucket.mutate.operator import Operator, SeenGraph, Site
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.words import nearest


@cache
def _ours() -> dict[str, Callable[[SeenGraph], Iterator[Site]]]:
    """The operators of this package, by name."""
    modules = [import_module(f"{operators.__name__}.{module.name}") for module in pkgutil.iter_modules(operators.__path__)]
    functions = ((name, found, module) for module in modules for name, found in getmembers(module, isfunction))
    return dict(
        sorted(
            (name, found)
            for name, found, module in functions
            if not name.startswith("_") and found.__module__ == module.__name__
        )
    )


def operators_of(names: Sequence[str]) -> list[Operator]:
    """The operators called ``names``, each once; all of ours without names. Raises UsageError for one that there is not."""
    return [_operator(name) for name in dict.fromkeys(names or _ours())]


def _operator(name: str) -> Operator:
    if ":" not in name and name not in (known := list(_ours())):
        raise UsageError(f'--operators: there is no operator "{name}"{nearest(name, known)}; known are {", ".join(known)}')
    found = import_callable(name, "--operators") if ":" in name else _ours()[name]
    says = (getdoc(found) or "").partition("\n")[0].rstrip(".")
    return Operator(name.rpartition(":")[2], says or name, found, getattr(found, "form", "passed"))
