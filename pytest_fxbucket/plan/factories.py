"""Python objects that a plan names: callables as ``module:callable``, imported once for all plans, and dtypes."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from pytest_fxbucket.errors import PlanError, named
from pytest_fxbucket.process.state import put_torch_settings, torch_settings_now

if TYPE_CHECKING:
    import torch


@contextmanager
def first_on_path(folders: Sequence[Path]) -> Iterator[None]:
    """Put folders first on sys.path, in their order, for as long as the block runs."""
    before = list(sys.path)
    wanted = [str(folder) for folder in folders]
    sys.path[:] = wanted + [entry for entry in before if entry not in wanted]
    try:
        yield
    finally:
        # Undoes also what an import in the block has added: :func:`import_as_first` keeps that.
        sys.path[:] = before


def import_callable(name: str, where: str) -> Callable[..., Any]:
    """Import the callable that ``module:callable`` names; raises PlanError, beginning with ``where``, if it cannot."""
    module_name, _, attribute = name.partition(":")
    try:
        found: object = import_as_first(module_name)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a module may end its process, or skip a test
        raise PlanError(f"{where}: {_why_not(module_name, error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, [known for known in dir(found) if not known.startswith("_")], n=1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise PlanError(f'{where}: module "{module_name}" has no "{attribute}"{hint}')
        found = getattr(found, part)
    if not callable(found):
        raise PlanError(f'{where}: "{name}" is a {type(found).__name__}, which cannot be called')
    return cast(Callable[..., Any], found)


def _why_not(module_name: str, error: BaseException) -> str:
    # The module itself, or a package around it; any other name is one that the module imports.
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return f'there is no module "{error.name}" in the folders on the path, the first being {sys.path[0]}'
    return f'importing "{module_name}" raised {named(error)}'


# A module is imported once for all plans that name it. Settings that its import changed are put back between plans, and set
# again for each plan that names it, or whose module imports it.


@dataclass(slots=True)
class _Changes:
    """Changes that the import of a module made to the process, to make them again after they were put back."""

    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str | None] = field(default_factory=dict)
    """Changed variables of the environment; None for one that was taken out."""
    path: list[str] = field(default_factory=list)
    """Folders that are new on ``sys.path``, in their order there."""


_changes_by: dict[str, _Changes] = {}


def import_as_first(name: str) -> ModuleType:
    """Import the module ``name``; if it was imported before, make its changes to torch's settings, environment, path again."""
    # Also in import statements of the user's own modules: a helper that two of them share is imported for the first alone.
    usual: Any = builtins.__import__

    def importing(asked: str, inside: Mapping[str, Any] | None = None, *more: Any, **named: Any) -> Any:
        # Of an import statement in code that was installed nothing is kept: there are thousands, and they set little.
        if not _is_users(inside or {}):
            return usual(asked, inside, *more, **named)
        level = named.get("level", more[2] if len(more) > 2 else 0)
        whole = importlib.util.resolve_name("." * level + asked, (inside or {}).get("__package__")) if level else asked
        return _as_first(whole, lambda: usual(asked, inside, *more, **named))

    builtins.__import__ = cast(Any, importing)
    try:
        return _as_first(name, lambda: importlib.import_module(name))
    finally:
        builtins.__import__ = usual


def _is_users(inside: Mapping[str, Any]) -> bool:
    """Whether a module of these globals is a file that was not installed."""
    file = inside.get("__file__")
    return bool(file) and not any(Path(str(file)).is_relative_to(folder) for folder in _INSTALLED)


_INSTALLED = {Path(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
_INSTALLED.add(Path(__file__).parents[1])


def _as_first(name: str, do_import: Callable[[], ModuleType]) -> ModuleType:
    if name in sys.modules:
        if changes := _changes_by.get(name):
            _put(changes)
        return do_import()
    # What the import changes is the difference between before and after. A setting that only exists afterwards, as when the
    # import brings torch in, is not counted as changed.
    settings, environ, path = torch_settings_now(), dict(os.environ), list(sys.path)
    module = do_import()
    now = os.environ
    _changes_by[name] = _Changes(
        {key: value for key, value in torch_settings_now().items() if settings.get(key, value) != value},
        {key: now.get(key) for key in {*environ, *now} if environ.get(key) != now.get(key)},
        [folder for folder in sys.path if folder not in path],
    )
    return module


def _put(changes: _Changes) -> None:
    put_torch_settings(changes.settings)
    for key, value in changes.environ.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    sys.path[:0] = [folder for folder in changes.path if folder not in sys.path]


def dtype_named(name: str | None) -> torch.dtype | None:
    """``torch.<name>``; None for None. Raises :class:`PlanError` if torch has no such dtype."""
    # Not at the head of the file: plans are read without torch.
    import torch

    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"torch has no dtype {name!r}")
    return dtype
