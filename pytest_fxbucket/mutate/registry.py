"""The operators that there are: the files of this package, and anybody's functions, as ``module:callable``."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from inspect import getdoc

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.mutate import operators
from pytest_fxbucket.mutate.operator import Operator
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.words import nearest


def operator_names() -> list[str]:
    """Names of the operators of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(operators.__path__))


def operators_of(names: Sequence[str]) -> list[Operator]:
    """The operators called ``names``, each once; all of ours without names. Raises UsageError for one that there is not."""
    return [_own(name) if ":" in name else _ours(name) for name in dict.fromkeys(names or operator_names())]


def _own(name: str) -> Operator:
    found = import_callable(name, "--operators")
    return Operator(name.rpartition(":")[2], _first_line(found) or name, found, getattr(found, "form", "passed"))


def _ours(name: str) -> Operator:
    if name not in (known := operator_names()):
        raise UsageError(f'--operators: there is no operator "{name}"{nearest(name, known)}; known are {", ".join(known)}')
    module = import_module(f"{operators.__name__}.{name}")
    return Operator(name, _first_line(module), module.sites, getattr(module, "FORM", "passed"))


def _first_line(documented: object) -> str:
    return (getdoc(documented) or "").partition("\n")[0].rstrip(".")
