"""The changes that a better plan makes to the plan file: keys, new values, and a diff of the file's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from difflib import unified_diff

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.load import BrokenRow, parse_rows
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Overlap
from pytest_fxbucket.plan.toml_text import to_toml
from pytest_fxbucket.tune.entries import items_of
from pytest_fxbucket.tune.moves import BY_HAND
from pytest_fxbucket.tune.toml_edit import Edits, edited


@dataclass(frozen=True, slots=True)
class Proposal:
    """The text of a plan file before and after."""

    old: str
    new: str
    """As ``old`` where the file cannot be edited."""
    diff: str
    """Diff of the file's text; for a matrix row, or a file that cannot be edited, of the changed keys as a row has them."""
    problem: str = ""
    """Why the file cannot be edited, or must not be, as a sentence."""


def edits_of(old: Plan, new: Plan) -> Edits:
    """By table and key each value of ``new`` that differs from ``old``, as a plan file writes it; None for a key to leave out.

    Only ``[bucket]`` and ``[overlap]`` are compared.
    """
    found: dict[tuple[str, str], object] = {}
    for table in ("bucket", "overlap"):
        before, after = getattr(old, table), getattr(new, table)
        for key in (spec.name for spec in fields(after)):
            if getattr(before, key) != getattr(after, key):
                found[table, key] = None if key in _unsaid(new) else _value(after, key)
    return found


def _unsaid(plan: Plan) -> set[str]:
    """Keys of [overlap] that a plan file leaves out: those that the plan's schedule refuses, and those that are None."""
    by_hand = BY_HAND if plan.overlap.schedule == "auto" else ()
    return {*by_hand} | {key for key in Overlap.__dataclass_fields__ if getattr(plan.overlap, key) is None}


def _value(table: object, key: str) -> object:
    value = getattr(table, key)
    if key == "plan":
        return items_of(value)
    if key == "cap_mb":
        caps = [_number(one) for one in value]
        return caps[0] if len(caps) == 1 else caps
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def proposal_of(text: str, old: Plan, new: Plan, agree: Callable[[Plan], None]) -> Proposal:
    """The change of ``text``, the plan file of ``old``, with which it says ``new``.

    ``agree`` raises PlanError for a plan whose keys do not fit the model.
    """
    name, edits, problem, made = str(old.path), edits_of(old, new), "", text
    if old.matrix_id is not None:
        problem = f'{name}: the keys of row "{old.matrix_id}" stand over those of the plan; write them there by hand'
    else:
        try:
            made = edited(text, edits, name)
        except PlanError as error:
            problem = str(error)
    if problem:
        return Proposal(text, text, _diff("".join(_dotted(old, edits)), "".join(_dotted(new, edits)), name), problem)
    return Proposal(text, made, _diff(text, made, name), _row_that_breaks(text, made, old, agree))


def _row_that_breaks(before: str, after: str, plan: Plan, agree: Callable[[Plan], None]) -> str:
    """A sentence on the first ``[[matrix]]`` row, each of which has the plan's keys, that was a plan and would be none."""
    for was, now in zip(parse_rows(before, plan.path), parse_rows(after, plan.path), strict=True):
        if _problem(was, agree) is None and (problem := _problem(now, agree)) is not None:
            return f"a row would be no plan any more: {problem}"
    return ""


def _problem(row: Plan | BrokenRow, agree: Callable[[Plan], None]) -> PlanError | None:
    try:
        if isinstance(row, BrokenRow):
            raise row.error
        agree(row)
    except PlanError as error:
        return error
    return None


def _dotted(plan: Plan, edits: Edits) -> Iterator[str]:
    """A line for each key of ``edits``, with its value in ``plan``."""
    for table, key in edits:
        value = getattr(getattr(plan, table), key)
        if value is not None:
            yield f"{table}.{key} = {to_toml(_value(getattr(plan, table), key))}\n"


def _diff(old: str, new: str, name: str) -> str:
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    lines = [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in unified_diff(before, after, name, name)
    ]
    return "".join(lines)
