"""Files that init writes, never over what is there; and a module tried before it is in its place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from pytest_fxbucket.errors import FxbucketError, UsageError
from pytest_fxbucket.plan.factories import first_on_path


def refuse_present(*paths: Path) -> None:
    """Raise UsageError for the first of ``paths`` that is there, which is left as it is."""
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} is already there and is left as it is; name another file with --out, or remove it")


def write_new(path: Path, text: str) -> None:
    """Write ``text`` and the folders above it. Raises FxbucketError if that cannot be done, or if the file is there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise FxbucketError(f"{path} cannot be written: {error.strerror or error}") from error


def module_beside(out: Path) -> Path:
    """Where the module of the plan ``out`` goes; raises UsageError if that is no module's name, or if either file is there."""
    if not out.stem.isidentifier():
        raise UsageError(
            f'--out {out}: "{out.stem}" is no name for a Python module, which lies beside the plan; use letters, digits, _'
        )
    path = out.with_suffix(".py")
    refuse_present(out, path)
    return path


@contextmanager
def laid_out(name: str, text: Callable[[Path], str]) -> Iterator[Path]:
    """A temporary folder, first on the path, with a module ``name`` whose source is ``text`` of the file's path.

    After the block that module is imported no more, and one of the same name from before is there again.
    """
    with TemporaryDirectory() as folder, first_on_path([Path(folder)]):
        path = Path(folder).resolve() / f"{name}.py"
        path.write_text(text(path), encoding="utf-8")
        before = sys.modules.pop(name, None)
        # The import system may have listed the folder before the file was there.
        importlib.invalidate_caches()
        try:
            yield path.parent
        finally:
            sys.modules.pop(name, None)
            if before is not None:
                sys.modules[name] = before


@contextmanager
def loaded(name: str, text: Callable[[Path], str]) -> Iterator[ModuleType]:
    """The module, imported from a folder of :func:`laid_out`."""
    with laid_out(name, text):
        yield importlib.import_module(name)
