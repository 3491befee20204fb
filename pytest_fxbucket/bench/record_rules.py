"""What each field of a stored measurement must be: a rule says what is wrong with a value, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from pytest_fxbucket.bench.series import LEAST_S, MOST_S

FORMAT = 1
SPELLING = {"pass_name": "pass"}
"""Attributes whose name in the JSON Python keeps for itself."""

Rule = Callable[[Any], str]
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_DEEPEST = 64  # tables and lists within each other
_LONGEST = 60  # characters of a value that is shown


def _kind(expects: str, *types: type) -> Rule:
    """A value of these types; a bool counts as a number only where bool is named."""

    def rule(value: Any) -> str:
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        return "" if fits else f"is {type(value).__name__} and not {expects}"

    return rule


_text, _table, _whole = _kind("text", str), _kind("a table", Mapping), _kind("a whole number", int)


def _seconds(value: Any) -> str:
    """A number of seconds that can have passed."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_S:
        return f"has {_short(value)} where seconds are expected"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def is_too_deep(value: Any) -> bool:
    """Whether tables and lists lie within each other more often than any that is written."""
    layer = [value]
    for _ in range(_DEEPEST):
        layer = [each for one in layer for each in (one.values() if isinstance(one, Mapping) else one)]
        layer = [each for each in layer if isinstance(each, Mapping | list | tuple)]
        if not layer:
            return False
    return True


def _commit(value: Any) -> str:
    return _text(value) or ("" if _COMMIT.fullmatch(value) else f"is {_short(value)} and not the sha of a commit")


def _count(least: int) -> Rule:
    def rule(value: Any) -> str:
        return _whole(value) or ("" if value >= least else f"is {value}, and {least} is the least")

    return rule


def _list_of(each: Rule) -> Rule:
    def rule(value: Any) -> str:
        if not isinstance(value, list | tuple):
            return f"is {type(value).__name__} and not a list"
        return next(filter(None, map(each, value)), "")

    return rule


def _time(value: Any) -> str:
    if _text(value):
        return _text(value)
    try:
        return "" if datetime.fromisoformat(value).tzinfo else f"is {_short(value)}, a time without a zone"
    except ValueError:
        return f"is {_short(value)} and not a time such as 2026-11-21T23:00:00+00:00"


def _machine(value: Any) -> str:
    rules = {"system": _text, "arch": _text, "cpu": _text, "cores": _count(1), "gpus": _list_of(_text)}
    return _table(value) or _fields(value, rules, "of which ")


def _samples(value: Any) -> str:
    """Positive seconds, the same number of sets and rounds for every variant, of both graphs at least."""
    missing = [name for name in ("bucketed", "unbucketed") if not isinstance(value, Mapping) or name not in value]
    if missing:
        return f"lacks {missing[0]!r}"
    if any(problem := _list_of(_list_of(_seconds))(sets) for sets in value.values()):
        return problem
    if any(sample < LEAST_S for sets in value.values() for rounds in sets for sample in rounds):
        return "has a step of no seconds"
    shapes = {name: [len(rounds) for rounds in sets] for name, sets in value.items()}
    if any(not shape or 0 in shape for shape in shapes.values()):
        return "holds no rounds"
    odd = [name for name, shape in shapes.items() if shape != shapes["bucketed"]]
    return f"has other rounds for {odd[0]!r} than for 'bucketed'" if odd else ""


def _graphs(value: Any) -> str:
    problem = _table(value) or next(filter(None, map(_table, value.values())), "")
    return problem or next(filter(None, (_graph(name, graph) for name, graph in value.items())), "")


def _graph(name: str, graph: Mapping[str, Any]) -> str:
    rules = {"digest": _text, "launches": _whole, "bytes": _whole, "peak_bytes": _list_of(_whole), "buckets": _list_of(_bucket)}
    return _fields(graph, rules, f"has a graph {name!r} of which ")


def _bucket(value: Any) -> str:
    rules = {"label": _text, "direction": _text, "bytes": _whole, "exposed_s": _perhaps(_seconds)}
    rules["in_flight_s"] = _perhaps(_seconds)
    return _table(value) or _fields(value, rules, "has a bucket of which ")


def _fields(table: Mapping[str, Any], rules: Mapping[str, Rule], before: str) -> str:
    missing = [name for name in rules if name not in table]
    if missing:
        return f"{before}{missing[0]!r} is not there"
    return next((f"{before}{name!r} {problem}" for name, rule in rules.items() if (problem := rule(table[name]))), "")


def _perhaps(rule: Rule) -> Rule:
    """The rule, or None: what could not be had on that back end."""
    return lambda value: "" if value is None else rule(value)


RULES: Mapping[str, Rule] = {
    "plan": _text,
    "row": _perhaps(_text),
    "workload": _table,
    "commit": _perhaps(_commit),
    "dirty": _kind("true or false", bool),
    "machine": _machine,
    "torch": _text,
    "python": _text,
    "backend": _text,
    "ranks": _count(1),
    "pass": _text,
    "time": _time,
    "samples": _samples,
    "warmup_rounds": _list_of(_count(0)),
    "is_stable": _kind("true or false", bool),
    "has_priority": _kind("true or false", bool),
    "capture_s": _seconds,
    "pass_s": _seconds,
    "graphs": _graphs,
}
