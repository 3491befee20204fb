"""The table of ``docs/reference/plan.md``, made from the schema: ``python -m suites.plans.plan_reference`` writes it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from pytest_fxbucket.plan.schema import Key, keys
from pytest_fxbucket.plan.toml_text import to_toml

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "plan.md"
BEGIN = "<!-- Made from the schema: `make reference` writes it anew. -->"
END = "<!-- End of what is made from the schema. -->"

_TOML = re.compile(r'\{.*\}|\[".*"\]|"[^"]*"')


def reference() -> str:
    """Give the table as Markdown, a row for each key in the order of the schema."""
    return "\n".join(["| key | it takes | default | what it means |", "|---|---|---|---|", *_rows()])


def replaced(page: str) -> str:
    """Give the text of the page with the table anew; raises ValueError where its two marks are not there."""
    before, found, rest = page.partition(BEGIN)
    _, also_found, after = rest.partition(END)
    if not (found and also_found):
        raise ValueError(f"the page has no table between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


def _rows() -> Iterator[str]:
    for key in keys():
        rule = key.rule
        means = rule.doc if rule.built else f"{rule.doc}; not built yet, so nothing but the default"
        cells = [f"`{key.table}.{key.key}`", _TOML.sub(r"`\g<0>`", rule.expects), _default(key), means]
        yield _row(cells)
        for spec in dataclasses.fields(rule.options) if rule.options is not None else ():
            own = spec.metadata["rule"]
            yield _row(
                [f"`{key.table}.{key.key}.{spec.name}`", _TOML.sub(r"`\g<0>`", own.expects), _said(spec.default), own.doc]
            )


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _said(value: object) -> str:
    """The default of a key within a key."""
    return "left out" if value is None else f"`{to_toml(list(value) if isinstance(value, tuple) else value)}`"


def _default(key: Key) -> str:
    value = key.default
    if value is dataclasses.MISSING:
        return "must be given"
    if value is None:
        return "left out"
    if isinstance(value, tuple):
        value = value[0] if len(value) == 1 else list(value)
    return f"`{to_toml(int(value) if isinstance(value, float) and value.is_integer() else value)}`"


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
