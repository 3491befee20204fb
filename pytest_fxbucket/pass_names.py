"""How passes are called, in plans, options and commands: by a name of ours, as ``module:callable``, or several in a row."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OURS = ["manual", "torch"]
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def no_pass(name: str) -> str | None:
    """Say that ``name`` is not written as a pass is, or as passes parted by commas, in a sentence; None if it is."""
    for one in in_order(name) or [name]:
        if one not in _OURS and not _CALLABLE.fullmatch(one):
            from pytest_fxbucket.words import nearest

            return f'"{one}" is no pass; expected manual, torch or module:callable{nearest(one, _OURS)}'
    return None


def in_order(name: str) -> list[str]:
    """The passes that ``name`` stands for, the first to run first; none for an empty one."""
    return [one.strip() for one in name.split(",")] if name else []


def listed(names: Sequence[str]) -> str:
    """The name that stands for ``names``, one after the other."""
    return ",".join(names)
