"""How passes are called, in options and commands: by a name of ours, or as ``module:callable``."""

from __future__ import annotations

import re

_OURS = ["manual", "torch"]
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def no_pass(name: str) -> str | None:
    """Say that ``name`` is not written as a pass is, in a sentence; None if it is."""
    if name in _OURS or _CALLABLE.fullmatch(name):
        return None
    from pytest_fxbucket.words import nearest

    return f'"{name}" is no pass; expected manual, torch or module:callable{nearest(name, _OURS)}'
