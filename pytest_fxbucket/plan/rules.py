"""What a key of a plan file takes: readers that check a value and turn it into the schema's type.

A rule is data in the metadata of a dataclass field. Each field of a plan's tables has one, and the loader calls its ``read``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.words import LONGEST_S, MOST_RANKS, nearest, one_or_other, show

_CALLABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Dimensions of the mesh, the outermost first."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one key takes; ``read(value, where)`` gives the checked value or raises PlanError naming ``where``."""

    doc: str
    expects: str
    read: Callable[[object, str], object]
    built: bool = True  # False: no value but the default is taken yet
    options: type[Any] | None = None  # dataclass whose fields are the keys of a table that is a value too


Metadata = Mapping[str, Rule]


def wrong(where: str, expects: str, value: object) -> PlanError:
    """Say that the value at ``where`` is not what a plan may hold there."""
    return PlanError(f"{where} must be {expects}, not {show(value)}")


def not_built(where: str, value: object, instead: str) -> PlanError:
    """Say that the value at ``where`` is known but not built yet, and what to do ``instead``."""
    return PlanError(f"{where} = {show(value)} is not built yet; {instead}")


Kind = type[Any]
_Read = Callable[[Any, str, str], object]


def rule_for(expects: str, kind: Kind = object) -> Callable[[_Read], Callable[[str], Metadata]]:
    """Turn ``read(value, where, expects)`` into the function that gives a key's rule for its doc.

    A value that is not of ``kind`` is refused before.
    """

    def rule_of(read: _Read) -> Callable[[str], Metadata]:
        def checked(value: object, where: str) -> object:
            if not isinstance(value, kind):
                raise wrong(where, expects, value)
            return read(value, where, expects)

        return lambda doc: {"rule": Rule(doc, expects, checked)}

    return rule_of


def one_of(doc: str, *choices: str, omit: bool = False) -> Metadata:
    """Take one of several strings; ``omit`` tells that leaving the key out has a meaning of its own."""
    expects = one_or_other([show(choice) for choice in choices]) + (", or left out" if omit else "")

    def read(value: object, where: str) -> object:
        if value not in choices:
            near = _nearest_choice(value, choices) if isinstance(value, str) else ""
            raise PlanError(f"{wrong(where, expects, value)}{near}")
        return value

    return {"rule": Rule(doc, expects, read)}


def _nearest_choice(value: str, choices: tuple[str, ...]) -> str:
    """Suggest the longest choice that ``value`` ends in, as torch's ScheduleGPipe ends in GPipe, or else the nearest."""
    ends = [choice for choice in choices if value.lower().endswith(choice.lower())]
    return f"; did you mean {show(max(ends, key=len))}?" if ends else nearest(value, list(choices))


def some_of(doc: str, *known: str) -> Metadata:
    """Take a list of several strings, each once, as a tuple in the order of ``known``."""
    expects = f"a list of {one_or_other([show(one) for one in known])}"

    def read(value: object, where: str) -> object:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise wrong(where, expects, value)
        if other := next((one for one in value if one not in known), None):
            raise PlanError(f"{where} must be {expects}, not {show(other)}{nearest(other, list(known))}")
        return tuple(one for one in known if one in value)

    return {"rule": Rule(doc, expects, read)}


def switch(doc: str, *, unbuilt: str = "") -> Metadata:
    """Take true or false; where true is not built yet, ``unbuilt`` is the clause that says what is done instead."""

    def read(value: object, where: str) -> object:
        if not isinstance(value, bool):
            raise wrong(where, "true or false", value)
        if value and unbuilt:
            raise not_built(where, value, f"{unbuilt}, so leave the key out")
        return value

    return {"rule": Rule(doc, "true or false", read, built=not unbuilt)}


def check_switch(doc: str, options: type[Any] | None = None) -> Metadata:
    """Take true, false, or a table of the check's own options, the fields of ``options``: true gives their defaults."""

    def read(value: object, where: str) -> object:
        if isinstance(value, Mapping):
            return _options(value, where, options)
        if not isinstance(value, bool):
            raise wrong(where, "true, false or a table", value)
        return options() if value and options is not None else value

    return {"rule": Rule(doc, "true, false or a table", read, options=options)}


def table_of(doc: str, options: type[Any]) -> Metadata:
    """Take a table, whose keys are the fields of ``options``."""

    def read(value: object, where: str) -> object:
        if not isinstance(value, Mapping):
            raise wrong(where, "a table", value)
        return _options(value, where, options)

    return {"rule": Rule(doc, "a table", read, options=options)}


def _options(raw: Mapping[str, object], where: str, options: type[Any] | None) -> object:
    """Read the table of a check's options; for a check without options an empty table is read as true."""
    rules = {spec.name: cast(Rule, spec.metadata["rule"]) for spec in dataclasses.fields(options)} if options else {}
    for key in raw:
        if not rules:
            raise PlanError(f'{where} has no key "{key}"; this check has no options, use true or false')
        if key not in rules:
            raise PlanError(f'{where} has no key "{key}"{nearest(key, list(rules)) or "; known are " + ", ".join(rules)}')
    return options(**{key: rules[key].read(value, f"{where}.{key}") for key, value in raw.items()}) if options else True


def passes(doc: str, *, in_order: bool = False) -> Metadata:
    """Take a list of passes, each once, as a tuple; ``in_order``: at least one, ours too, which may run again behind others."""
    one = callable_name("", *(("manual", "torch") if in_order else ("torch",)))["rule"]
    expects = f"a list of passes, each {one.expects}"

    def read(value: object, where: str) -> object:
        if not isinstance(value, list) or (in_order and not value):
            raise wrong(where, expects, value)
        for index, name in enumerate(value):
            one.read(name, f"{where}[{index}]")
            if not in_order and name in value[:index]:
                raise PlanError(f"{where} has {show(name)} twice; name it once")
        return tuple(value)

    return {"rule": Rule(doc, expects, read)}


def whole(doc: str, *, least: int, limit: int = 10**9) -> Metadata:
    """Take a whole number from ``least`` to ``limit``, far above all that can be meant."""
    expects = f"a whole number of at least {least}"

    def read(value: object, where: str) -> object:
        # Python's True is an int, while to TOML true is no number.
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong(where, expects, value)
        if value > limit:
            raise PlanError(f"{where} must be at most {limit}, not {show(value)}")
        return value

    return {"rule": Rule(doc, expects, read)}


@rule_for("a number of seconds above 0")
def seconds(value: object, where: str, expects: str) -> object:
    """Take a finite number of seconds above 0, as a float."""
    found = finite_number(value, where, expects, lambda number: 0 < number < math.inf)
    if found > LONGEST_S:
        raise PlanError(f"{where} must be at most {LONGEST_S} seconds, not {show(value)}")
    return found


def callable_name(doc: str, *names: str) -> Metadata:
    """Take ``module:callable`` as text, or one of ``names``; nothing is imported."""
    expects = one_or_other([*(show(name) for name in names), '"module:callable"'])

    def read(value: object, where: str) -> object:
        if not isinstance(value, str) or not (value in names or _CALLABLE.fullmatch(value)):
            raise PlanError(f"{wrong(where, expects, value)}{_meant(value, names)}")
        return value

    return {"rule": Rule(doc, expects, read)}


_ELSEWHERE = {"ddp": "replicate", "fsdp": "fully_shard", "fsdp2": "fully_shard", "zero3": "fully_shard", "hsdp": "hybrid_shard"}
"""Names that other libraries have for the same modes."""
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.([A-Za-z_]\w*)")


def _meant(value: object, names: tuple[str, ...]) -> str:
    """Which of ``names``, or which callable, was meant, as ``; did you mean "x"?``; nothing if that is not known."""
    if not isinstance(value, str):
        return ""
    if (own := _ELSEWHERE.get(value.lower())) in names:
        return f"; did you mean {show(own)}?"
    # Dots alone, as in an import: the last part is taken for the callable.
    if dotted := _DOTTED.fullmatch(value):
        return f'; did you mean "{dotted[1]}:{dotted[2]}"?'
    return nearest(value, list(names))


@rule_for("a table of keyword arguments", Mapping)
def keyword_arguments(value: Mapping[object, object], where: str, expects: str) -> object:
    """Take a table of anything, as a dict."""
    for name in value:
        if not str(name).isidentifier():
            raise PlanError(f"{where} has {show(name)}, which is no name of a keyword argument")
    return dict(value)


@rule_for("a number of MB from 0, or a list of them")
def caps(value: object, where: str, expects: str) -> object:
    """Take a number of MB from 0 or a list of them, as a tuple of floats."""
    if isinstance(value, list) and value:
        return tuple(_cap(each, f"{where}[{i}]", "a number of MB from 0") for i, each in enumerate(value))
    return (_cap(value, where, expects),)


def _cap(value: object, where: str, expects: str) -> float:
    return finite_number(value, where, expects, lambda number: 0 <= number < math.inf)


@rule_for("a table such as { dp_shard = 4 }", Mapping)
def degrees(value: Mapping[str, object], where: str, expects: str) -> object:
    """Take a table of mesh degrees, as a dict."""
    for name in value:
        if name not in DEGREES:
            raise PlanError(f'{where} has no key "{name}"{nearest(name, list(DEGREES))}')
    return {name: _of_several(degree, f"{where}.{name}") for name, degree in value.items()}


def _of_several(degree: object, where: str) -> object:
    if degree == 1 and not isinstance(degree, bool):
        raise PlanError(
            f"{where} must be a whole number of at least 2, not 1: along one rank there is nothing to compare; use 2, or leave "
            "it out where [parallel] has 1"
        )
    return whole("", least=2, limit=MOST_RANKS)["rule"].read(degree, where)


def number_that(doc: str, expects: str, fits: Callable[[float], bool]) -> Metadata:
    """Take a number that ``fits``, as a float."""
    return {"rule": Rule(doc, expects, partial(finite_number, expects=expects, fits=fits))}


def number(doc: str, *, least: float) -> Metadata:
    """Take a finite number from ``least``, as a float."""
    return number_that(doc, f"a number of at least {least:g}", lambda found: least <= found < math.inf)


def above_zero(doc: str) -> Metadata:
    """Take a finite number above 0, as a float."""
    return number_that(doc, "a number above 0", lambda found: 0 < found < math.inf)


def share(doc: str) -> Metadata:
    """Take a number from 0 to 1, as a float: how much of something."""
    return number_that(doc, "a number from 0 to 1, such as 0.98 for 98 %", lambda found: 0 <= found <= 1)


def part(doc: str) -> Metadata:
    """Take a number from 0 and below 1, as a float: a part of something."""
    return number_that(doc, "a number from 0 and below 1, such as 0.03 for 3 %", lambda found: 0 <= found < 1)


def finite_number(value: object, where: str, expects: str, fits: Callable[[float], bool]) -> float:
    """Give a number that ``fits`` as a float; one too large for a float counts as infinite."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        # float() raises for an int that is too large; and nan, which is not below anything, becomes infinite here.
        found = float(value) if abs(value) < 1e300 else math.inf
        if fits(found):
            return found
    raise wrong(where, expects, value)
