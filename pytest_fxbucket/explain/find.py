"""From what was typed to the plan, its row and the parameters that are meant. Pure, but for reading the plan file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.registry import CHECKS
from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.plan.load import BrokenRow, load_rows
from pytest_fxbucket.words import nearest, some

if TYPE_CHECKING:
    from pytest_fxbucket.explain.report import ExplainedParameter
    from pytest_fxbucket.plan.schema import Plan

_NAMED = re.compile(r"(?P<path>.+?)(?:::(?P<item>[^\[\]]+))?(?:\[(?P<row>[^\[\]]+)\])?")


def find_plan(text: str) -> tuple[Plan, list[str]]:
    """The plan that ``text`` names, and the ids of all rows of its file.

    ``text`` is a file, with the row as ``FILE::ROW`` or ``FILE[ROW]``, or the node id of an item, ``FILE::audit[ROW]``. Raises
    PlanError for a file that cannot be loaded, UsageError for a file that is not there or a row that it does not have.
    """
    path, row = parts(text)
    if os.path.islink(path) and not os.path.exists(path):
        raise UsageError(f"{path} is a link that leads nowhere")
    if not os.path.exists(path):
        near = get_close_matches(path.stem, sorted(one.stem for one in path.parent.glob("*.toml")), n=1)
        raise UsageError(f"{path} is not there{f'; did you mean {path.with_name(near[0])}.toml?' if near else ''}")
    # A broken row is an error only for who asks for it: the other rows are good.
    plans: dict[str | None, Plan] = {}
    for one in load_rows(path):
        if not isinstance(one, BrokenRow):
            plans[one.matrix_id] = one
        elif one.name == row:
            raise one.error
    rows = [name for name in plans if name]
    if row not in plans:
        known = f"rows there: {', '.join(rows)}" if rows else "it has no rows"
        raise UsageError(f'{path} has no [[matrix]] row "{row}"; {known}{nearest(row or "", rows)}')
    return plans[row], rows


def parts(text: str) -> tuple[Path, str | None]:
    """File and row that ``text`` names, whether they are there or not."""
    if os.path.exists(text):  # which says no of names that cannot be, where pathlib raises
        return Path(text), None
    found = _NAMED.fullmatch(text)
    if found is None:
        return Path(text), None
    # ``FILE::ROW`` looks like the node id of an item without a row: what is no check's name is taken for a row.
    # An item may end in the world that it runs on, as ``bitwise@4``.
    item, row = found["item"], found["row"]
    if item is not None and row is None and item.partition("@")[0] not in CHECKS:
        row = item
    return Path(found["path"]), row


def find_parameters(text: str, known: Sequence[ExplainedParameter]) -> list[ExplainedParameter]:
    """The parameters that ``text`` names: an FQN, the end of one alone, or a glob. Raises UsageError if it names none."""
    by_name = {name: parameter for parameter in known for name in (parameter.fqn, *parameter.aliases)}
    if text in by_name:
        return [by_name[text]]
    if any(char in text for char in "*?["):
        matched = [name for name in by_name if fnmatchcase(name, text)]
    else:
        matched = [name for name in by_name if name.endswith(f".{text}")]
        # Counted by parameter: several names of one tied parameter leave no doubt.
        if len({by_name[name].fqn for name in matched}) > 1:
            raise UsageError(
                f'"{text}" ends {len(matched)} parameters: {some(matched)}; write more of one, or "*.{text}" for all'
            )
    if not matched:
        raise UsageError(f'there is no parameter "{text}"{_nearest(text, list(by_name))}')
    return list({by_name[name].fqn: by_name[name] for name in matched}.values())


def _nearest(text: str, names: Sequence[str]) -> str:
    below = [name for name in names if name.startswith(f"{text}.")]
    if below:
        return f'; it is a module, which holds {some(below)}: name one of them, or all as "{text}.*"'
    near: list[str] = []
    for parts in range(text.count(".") + 1, 0, -1):  # as much of the end as was typed, then less
        # Reversed, so that of names with one end the first is kept.
        ends = {".".join(name.split(".")[-parts:]): name for name in reversed(names)}
        typed = ".".join(text.split(".")[-parts:])
        near = near or [ends[end] for end in get_close_matches(typed, list(ends), n=2, cutoff=0.6)]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there are {some(names)}" if names else "; the step has none"
