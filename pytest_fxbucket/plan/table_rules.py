"""Rules of keys whose value is a table or a list with a form of its own. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.rules import rule_for, wrong
from pytest_fxbucket.words import nearest, one_or_other, show

DIRECTIONS = ("forward", "backward")

Places = Mapping[str, Mapping[str, str]]
"""For each direction, from the entry that is launched or waited for to the entry whose compute starts then."""


@rule_for('a table such as { forward = { "layers.3" = "layers.1" } }', Mapping)
def entry_pairs(value: Mapping[str, object], where: str, expects: str) -> object:
    """Take a table of entry = entry for each direction, as dicts; directions without a pair are left out."""
    for direction in value:
        if direction not in DIRECTIONS:
            raise PlanError(f'{where} has no key "{direction}"{nearest(str(direction), list(DIRECTIONS))}')
    found = {direction: _pairs(value[direction], f"{where}.{direction}") for direction in DIRECTIONS if direction in value}
    return {direction: pairs for direction, pairs in found.items() if pairs}


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


# ``[parallel] reshard_after_forward``: which entries' parameters are gathered again in backward.


@rule_for('true, false or a table such as { "layers.*" = true, "norm+output" = false }')
def reshard(value: object, where: str, expects: str) -> object:
    """Take true, false, or a table of selector = true or false; selectors are left as they are written."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping) or not value:
        raise wrong(where, expects, value)
    for selector, again in value.items():
        parse_entries([selector], where)  # for its errors alone
        if not isinstance(again, bool):
            raise wrong(f'{where}."{selector}"', "true or false; a selector with dots stands in quotes", again)
    return dict(value)


# ``[parallel] tp_plan``: how linears are parted over tensor parallel ranks, and activations between them.


SEQUENCE_STYLES = ("sequence", "scatter", "gather")
STYLES = ("colwise", "rowwise", *SEQUENCE_STYLES)


@rule_for('a table such as { "layers.*.wq" = "colwise", "layers.*.wo" = "rowwise" }', Mapping)
def tp_styles(value: Mapping[str, object], where: str, expects: str) -> object:
    """Take a table of selector = style, as a dict; selectors are left as they are written."""
    for selector, style in value.items():
        _refuse_table(selector, style, where)
        parse_entries([selector], where)  # for its errors alone
        if style not in STYLES:
            near = nearest(style, list(STYLES)) if isinstance(style, str) else ""
            inside = f'{where}."{selector}"'
            raise PlanError(f"{wrong(inside, one_or_other([show(one) for one in STYLES]), style)}{near}")
    return dict(value)


def _refuse_table(selector: str, style: object, where: str) -> None:
    """Raise PlanError for a selector whose dots are not in quotes, of which TOML makes tables within tables."""
    path = [selector]
    while isinstance(style, Mapping) and style:
        inner, style = next(iter(style.items()))
        path.append(inner)
    if len(path) > 1:
        written = f'"{".".join(path)}" = {show(style)}'
        raise PlanError(f"{where} has a table at {selector}; write a selector with dots in quotes, as in {written}")


# ``[optimizer] groups``: the parameter groups of one optimizer.


_WORDS = ("one", "entry")


@rule_for('"one", "entry" or a list of tables such as { params = ["norm"], weight_decay = 0.0 }')
def parameter_groups(value: object, where: str, expects: str) -> object:
    """Take "one", "entry", or a list of tables with params and the group's own arguments, as a tuple of dicts.

    In each dict ``params`` is a tuple of entries; a group without ``params`` has the parameters that no other group has.
    """
    if isinstance(value, str):
        if value not in _WORDS:
            raise PlanError(f"{wrong(where, expects, value)}{nearest(value, list(_WORDS))}")
        return value
    if not isinstance(value, list) or not value:
        raise wrong(where, expects, value)
    return tuple(_group(each, f"{where}[{number}]") for number, each in enumerate(value))


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


# ``[pipeline] cuts``: modules by their paths, each once.


@rule_for('a list of module paths such as ["layers.3", "layers.7"]', list)
def module_paths(value: list[object], where: str, expects: str) -> object:
    """Take a list of module paths, each once, as a tuple; an empty list means none, so that a matrix row can undo the key."""
    for index, path in enumerate(value):
        if not isinstance(path, str):
            raise wrong(f"{where}[{index}]", "the path of a module in quotes", path)
        if not path.strip():
            raise PlanError(f"{where}[{index}] is an empty name; name the module behind which a stage ends, or take it out")
        if not all(path.split(".")) or any(char.isspace() or char in "*[]+" for char in path):
            raise PlanError(f'{where}[{index}] = {show(path)} is no path of one module; write it out, as in "layers.3"')
        if path in value[:index]:
            raise PlanError(f"{where} has {show(path)} twice; name it once")
    return tuple(value)


# ``[model] inputs``: the values of a batch that go to the model, as names, positions, or paths such as ``"0.input_ids"``.


Path = tuple[str | int, ...]
"""Keys of dicts and positions in tuples, from the batch inwards; the last may be ``*``, which stands for all values there."""


@rule_for('a list of names or positions such as ["input_ids", "attention_mask"] or [0]', list)
def model_inputs(value: list[object], where: str, expects: str) -> tuple[Path, ...]:
    """Take a list of paths, each once, as a tuple of them."""
    if not value:
        raise wrong(where, expects, value)
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
    # isdigit alone takes digits, such as superscripts, that int does not.
    return tuple(int(step) if step.isascii() and step.isdigit() else step for step in steps)
