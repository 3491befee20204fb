"""``[parallel] tp_plan``: how linears are parted over tensor parallel ranks. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.rules import Metadata, Rule, wrong
from pytest_fxbucket.units import nearest, one_or_other, show

STYLES = ("colwise", "rowwise")


def linear_styles(doc: str) -> Metadata:
    """Take a table of selector = style, as a dict; selectors are left as they are written."""
    expects = 'a table such as { "layers.*.wq" = "colwise", "layers.*.wo" = "rowwise" }'

    def read(value: object, where: str) -> object:
        if not isinstance(value, Mapping):
            raise wrong(where, expects, value)
        for selector, style in value.items():
            _refuse_table(selector, style, where)
            parse_entries([selector], where)
            if style not in STYLES:
                near = nearest(style, list(STYLES)) if isinstance(style, str) else ""
                inside = f'{where}."{selector}"'
                raise PlanError(f"{wrong(inside, one_or_other([show(one) for one in STYLES]), style)}{near}")
        return dict(value)

    return {"rule": Rule(doc, expects, read)}


def _refuse_table(selector: str, style: object, where: str) -> None:
    """TOML makes tables within tables of a selector whose dots are not in quotes."""
    path = [selector]
    while isinstance(style, Mapping) and style:
        inner, style = next(iter(style.items()))
        path.append(inner)
    if len(path) > 1:
        written = f'"{".".join(path)}" = {show(style)}'
        raise PlanError(f"{where} has a table at {selector}; write a selector with dots in quotes, as in {written}")
