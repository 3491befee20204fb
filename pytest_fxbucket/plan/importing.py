"""A module is imported once for all plans that name it; what its import left in the process is there for each of them."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from pytest_fxbucket.process_state import put_torch_settings, torch_settings_now


@dataclass(slots=True)
class _Left:
    """What the import of a module changed, so that it can be had again once it was put back."""

    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str | None] = field(default_factory=dict)
    """None: taken out."""
    path: list[str] = field(default_factory=list)
    """Folders that are new on it, and where."""


_left: dict[str, _Left] = {}


def import_as_first(name: str) -> ModuleType:
    """Import the module ``name``; if that was done before, with what it set then: torch's settings, environment, path."""
    if name in sys.modules:
        if left := _left.get(name):
            _put(left)
        return importlib.import_module(name)
    settings, environ, path = torch_settings_now(), dict(os.environ), list(sys.path)
    module = importlib.import_module(name)
    now = os.environ
    _left[name] = _Left(
        {key: value for key, value in torch_settings_now().items() if settings.get(key, value) != value},
        {key: now.get(key) for key in {*environ, *now} if environ.get(key) != now.get(key)},
        [folder for folder in sys.path if folder not in path],
    )
    return module


def _put(left: _Left) -> None:
    put_torch_settings(left.settings)
    for key, value in left.environ.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    sys.path[:0] = [folder for folder in left.path if folder not in sys.path]
