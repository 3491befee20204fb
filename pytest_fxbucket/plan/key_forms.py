"""Keys whose value has a form of its own: read from TOML, checked, and asked by whoever uses them. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, cast

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.rules import Metadata, Rule, part, passes, seconds, whole, wrong
from pytest_fxbucket.plan.selectors import ROOT
from pytest_fxbucket.words import nearest, one_or_other, show, some

DIRECTIONS = ("forward", "backward")

Places = Mapping[str, Mapping[str, str]]
"""By direction: the entry that is launched or waited for, to the entry whose compute starts then."""


def places(doc: str) -> Metadata:
    """Take a table of entry = entry for each direction, as dicts; directions without a pair are left out."""
    expects = 'a table such as { forward = { "layers.3" = "layers.1" } }'

    def read(value: object, where: str) -> object:
        if not isinstance(value, Mapping):
            raise wrong(where, expects, value)
        for direction in value:
            if direction not in DIRECTIONS:
                raise PlanError(f'{where} has no key "{direction}"{nearest(str(direction), list(DIRECTIONS))}')
        found = {direction: _pairs(value[direction], f"{where}.{direction}") for direction in DIRECTIONS if direction in value}
        return {direction: pairs for direction, pairs in found.items() if pairs}

    return {"rule": Rule(doc, expects, read)}


def _pairs(raw: object, where: str) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise wrong(where, "a table of entry = entry", raw)
    pairs: dict[str, str] = {}
    for entry, other in raw.items():
        if isinstance(other, Mapping):
            inner = next(iter(other), "0")
            raise PlanError(
                f'{where} has a table at {entry}; write an entry with dots in quotes, as in "{entry}.{inner}" = ...'
            )
        for name in (entry, other):
            if not isinstance(name, str) or not name.strip():
                raise PlanError(f"{where} has {show(name)} in the pair of {show(entry)}; write entry = entry, each in quotes")
        pairs[entry] = other
    return pairs


def refuse_wrong_places(key: str, by_direction: Places, entries: Sequence[str], where: str) -> None:
    """Raise PlanError, beginning with ``where``, for pairs that name no entry of ``entries``, or that form a circle.

    ``key`` is ``launch_at`` or ``wait_before``. Whether a place can be had in a graph is for the pass to tell.
    """
    for direction, pairs in by_direction.items():
        inside = f"{where}: [overlap] {key}.{direction}"
        for entry, other in pairs.items():
            for name in (entry, other):
                if name not in entries:
                    raise PlanError(f'{inside}: "{entry}" = "{other}" names no bucket: {_no_entry(name, entries)}')
        circle = _circle(pairs)
        if circle:
            raise PlanError(f"{inside}: {_says(circle)}")


def _no_entry(name: str, entries: Sequence[str]) -> str:
    """Say that ``name`` is no entry, and which one is meant."""
    holders = [entry for entry in entries if any(name == part or name.startswith(f"{part}.") for part in entry.split("+"))]
    if holders:
        return f'"{name}" is within the entry "{holders[0]}"; name that'
    close = get_close_matches(name, entries, n=1, cutoff=0.6)
    if close:
        return f'there is no entry "{name}"; did you mean "{close[0]}"?'
    more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
    return f'there is no entry "{name}"; entries are {", ".join(entries[:6])}{more}'


def _circle(pairs: Mapping[str, str]) -> list[str]:
    """Entries of which each is placed at the next one and the last at the first; empty if there are none.

    Every entry is placed at one other at most, so a walk from it either ends or comes back.
    """
    done: set[str] = set()
    for start in pairs:
        walk: list[str] = []
        entry: str | None = start
        while entry is not None and entry not in done:
            done.add(entry)
            walk.append(entry)
            entry = pairs.get(entry)
        if entry in walk:
            return walk[walk.index(entry) :]
    return []


def _says(circle: Sequence[str]) -> str:
    if len(circle) == 1:
        return f'"{circle[0]}" is placed at itself; name the entry whose compute is to hide it'
    ring = " -> ".join([*circle, circle[0]])
    return f"the pairs form a circle, {ring}; each would have to come before the next, so take one out"


# ``[parallel] reshard_after_forward``: which entries' parameters are gathered again in backward.


Asked = bool | Mapping[str, bool] | None
"""For all entries, by selector of entries, or (None, and entries that no selector names) as FSDP2 has it by default."""

WHERE = "[parallel] reshard_after_forward"


def reshard(doc: str) -> Metadata:
    """Take true, false, or a table of selector = true or false; selectors are left as they are written."""
    expects = 'true, false or a table such as { "layers.*" = true, "norm+output" = false }'

    def read(value: object, where: str) -> object:
        if isinstance(value, bool):
            return value
        if not isinstance(value, Mapping) or not value:
            raise wrong(where, expects, value)
        for selector, again in value.items():
            parse_entries([selector], where)
            if not isinstance(again, bool):
                raise wrong(f'{where}."{selector}"', "true or false; a selector with dots stands in quotes", again)
        return dict(value)

    return {"rule": Rule(doc, expects, read, (False, True))}


def kept_entries(asked: Asked, entries: Sequence[str], last: str | None) -> frozenset[str]:
    """Which of ``entries`` stay gathered until backward; ``last`` is the one that forward reads last.

    Left out it is as in FSDP2, whose root stays since backward needs it at once: what no entry names (``unplanned = "root"``),
    and the entry that forward reads last. Raises PlanError for a selector that stands for no entry, and for two that differ.
    """
    if isinstance(asked, bool):
        return frozenset(() if asked else entries)
    named = _by_entry(asked or {}, entries)
    return frozenset(entry for entry in entries if not named.get(entry, entry not in (last, ROOT)))


def _by_entry(asked: Mapping[str, bool], entries: Sequence[str]) -> dict[str, bool]:
    found: dict[str, tuple[str, bool]] = {}
    for selector, again in asked.items():
        matched = [entry for entry in entries if _stands_for(selector, entry)]
        if not matched:
            raise PlanError(f'{WHERE} names "{selector}", which is no entry of [bucket] plan; entries are {some(entries)}')
        for entry in matched:
            other, before = found.setdefault(entry, (selector, again))
            if before != again:
                raise PlanError(
                    f'{WHERE} is {show(before)} for {entry} by "{other}" and {show(again)} by "{selector}"; '
                    "let one of them name it"
                )
    return {entry: again for entry, (_, again) in found.items()}


def _stands_for(selector: str, entry: str) -> bool:
    """Whether each module of ``entry`` is one that ``selector`` names."""
    patterns = [name for one in parse_entries([selector], WHERE) for name in one.selectors]
    names = [name for one in parse_entries([entry], WHERE) for name in one.selectors]
    return selector == entry or all(any(_matches(pattern, name) for pattern in patterns) for name in names)


def _matches(pattern: str, name: str) -> bool:
    parts, own = pattern.split("."), name.split(".")
    return len(parts) == len(own) and all(a in ("*", b) for a, b in zip(parts, own, strict=True))


# ``[parallel] tp_plan``: how linears are parted over tensor parallel ranks.


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


# ``[optimizer] groups``: the parameter groups of one optimizer.


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


# ``[model] inputs``: what of a batch goes to the model, as names, positions, or paths such as ``"0.input_ids"``.


Path = tuple[str | int, ...]
"""Keys of dicts and positions in tuples, from the batch inwards; the last may be ``*``: all that is there."""

_EXPECTS = 'a list of names or positions such as ["input_ids", "attention_mask"] or [0]'


def model_inputs(doc: str) -> Metadata:
    """Make the rule of the key, which gives a tuple of paths."""
    return {"rule": Rule(doc, _EXPECTS, _read)}


def _read(value: object, where: str) -> tuple[Path, ...]:
    if not isinstance(value, list) or not value:
        raise wrong(where, _EXPECTS, value)
    paths = [_path(item, f"{where}[{index}]") for index, item in enumerate(value)]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise PlanError(f"{where} has {show(value[index])} twice; name it once")
    return tuple(paths)


def _path(item: object, where: str) -> Path:
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return (item,)
    if not isinstance(item, str):
        raise wrong(where, 'a key of the batch, a position from 0, or a path such as "0.input_ids"', item)
    steps = item.split(".")
    if not all(steps) or "*" in steps[:-1]:
        raise PlanError(f'{where} = {show(item)} is no path; write keys and positions with single dots, as in "0.input_ids"')
    return tuple(int(step) if step.isascii() and step.isdigit() else step for step in steps)


@dataclass(frozen=True, slots=True)
class Ring:
    """Its options; the chunks of NCCL's protocol Simple unless said otherwise."""

    channels: int = field(
        default=4, metadata=whole("parts that a message is split into, each summed round a ring order of its own", least=1)
    )
    chunk_bytes: int = field(
        default=2**21, metadata=whole("bytes of an all-reduce, at most, that one rank is the last to add to", least=16)
    )
    nodes: int = field(
        default=1, metadata=whole("nodes of equally many ranks each; a ring goes through one after the other", least=1)
    )


# ``[checks] benchmark`` as a table: how step time is measured and judged.


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The options of the check ``benchmark``."""

    threshold: float = field(default=0.03, metadata=part("a smaller loss of step time is no regression"))
    precision: float = field(
        default=0.01,
        metadata=part("how well bucketed/unbucketed is to be known; samples end when it is, 0: when the time is over"),
    )
    budget_s: float = field(
        default=20.0,
        metadata=seconds("seconds of warm-up and samples; at least 8 rounds of each are run in each of 4 sets of processes"),
    )
    against: tuple[str, ...] = field(
        default=(), metadata=passes('passes that are timed beside the plan\'s: `"torch"` or `"module:callable"`')
    )


def benchmark_of(planned: Benchmark | Literal[False], changes: Mapping[str, object]) -> Benchmark:
    """The plan's options, or the defaults, with ``changes``. Raises PlanError for what no plan may hold."""
    known = {spec.name: cast(Rule, spec.metadata["rule"]) for spec in fields(Benchmark)}
    for key in changes:
        if key not in known:
            raise PlanError(f'fxbucket_benchmark has no argument "{key}"{nearest(key, list(known))}')
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    read = {key: known[key].read(value, f"fxbucket_benchmark: {key}") for key, value in given.items()}
    return replace(planned or Benchmark(), **cast("dict[str, Any]", read))
