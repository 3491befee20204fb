"""Folders of a plan's own code, which are first on ``sys.path`` while its callables are imported."""

from __future__ import annotations

from pathlib import Path

_CONFIGURED = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg", "setup.py")


def root_of(plan: Path) -> Path:
    """The nearest folder above ``plan`` with a file that can configure pytest; the current folder if there is none."""
    folders = plan.resolve().parents
    return next((folder for folder in folders if any((folder / name).is_file() for name in _CONFIGURED)), Path.cwd())


def folders_of(plan: Path, rootdir: Path | None = None) -> list[Path]:
    """The plan's own folder, then ``rootdir``, if pytest has one that is elsewhere, then :func:`root_of`."""
    found = [plan.resolve().parent, *([rootdir] if rootdir is not None else []), root_of(plan)]
    return list(dict.fromkeys(found))
