"""``[model] inputs``: what of a batch goes to the model, as names, positions, or paths such as ``"0.input_ids"``."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.rules import Metadata, Rule, wrong
from pytest_fxbucket.units import show

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
