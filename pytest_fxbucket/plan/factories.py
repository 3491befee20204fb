"""``module:callable`` names: from the text in a plan to the callable. Imports no torch of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from pytest_fxbucket.errors import PlanError, named
from pytest_fxbucket.plan.importing import import_as_first


@contextmanager
def first_on_path(folders: Sequence[Path]) -> Iterator[None]:
    """Put folders first on sys.path, in their order, for as long as the block runs."""
    before = list(sys.path)
    wanted = [str(folder) for folder in folders]
    sys.path[:] = wanted + [entry for entry in before if entry not in wanted]
    try:
        yield
    finally:
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
            close = get_close_matches(part, [known for known in vars(found) if not known.startswith("_")], n=1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise PlanError(f'{where}: module "{module_name}" has no "{attribute}"{hint}')
        found = getattr(found, part)
    if not callable(found):
        raise PlanError(f'{where}: "{name}" is a {type(found).__name__}, which cannot be called')
    return cast(Callable[..., Any], found)


def _why_not(module_name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return f'there is no module "{error.name}" in the folders on the path, the first being {sys.path[0]}'
    return f'importing "{module_name}" raised {named(error)}'
