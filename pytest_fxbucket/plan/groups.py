"""``[optimizer] groups``: the parameter groups of one optimizer. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.rules import Metadata, Rule, wrong
from pytest_fxbucket.units import nearest, show

_WORDS = ("one", "entry")


def parameter_groups(doc: str) -> Metadata:
    """Take "one", "entry", or a list of tables with params and the group's own arguments, as a tuple of dicts.

    In each dict ``params`` is a tuple of entries; one without has what no other has.
    """
    expects = '"one", "entry" or a list of tables such as { params = ["norm"], weight_decay = 0.0 }'

    def read(value: object, where: str) -> object:
        if isinstance(value, str):
            if value not in _WORDS:
                raise PlanError(f"{wrong(where, expects, value)}{nearest(value, list(_WORDS))}")
            return value
        if not isinstance(value, list) or not value:
            raise wrong(where, expects, value)
        return tuple(_group(each, f"{where}[{number}]") for number, each in enumerate(value))

    return {"rule": Rule(doc, expects, read)}


def _group(raw: object, where: str) -> dict[str, object]:
    if not isinstance(raw, Mapping):
        raise wrong(where, 'a table such as { params = ["norm"], weight_decay = 0.0 }', raw)
    if raw.get("params") == []:
        raise PlanError(
            f"{where} has an empty params; name the modules or parameters of the group, or leave it out for the rest"
        )
    for name in raw:
        if not str(name).isidentifier():
            raise PlanError(f"{where} has {show(name)}, which is no name of an argument")
    if "params" not in raw:
        return dict(raw)
    return {**raw, "params": parse_entries(raw["params"], f"{where} params")}
