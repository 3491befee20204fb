"""Names of a package that are imported when they are first asked for, since their modules bring torch in, or more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def on_first_use(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``; ``names`` are those that each module has, by its path below this package."""
    home = {name: module for module, own in names.items() for name in own}

    def load(name: str) -> Any:
        if name in home:
            return getattr(import_module(f"pytest_fxbucket.{home[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
