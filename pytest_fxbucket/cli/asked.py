"""Arguments that several commands have: the plan and the pass."""

from __future__ import annotations

import re

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.plan.rules import nearest

_PASSES = ["manual", "torch"]
_PASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
PLAN = "PLAN[::ROW]"
PLAN_HELP = (
    "plan file; ROW is the id of a [[matrix]] row, left out: the plan above the rows. FILE[ROW] and the node id of an "
    "item, as pytest prints it, mean the same"
)


def refuse_no_pass(name: str) -> None:
    """Raise UsageError unless ``name`` is written as a pass is."""
    if name not in _PASSES and not _PASS.fullmatch(name):
        raise UsageError(f"--pass {name} is no pass; expected manual, torch or module:callable{nearest(name, _PASSES)}")
