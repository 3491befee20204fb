"""The module tree of a model as ``fxbucket init`` prints it, and what it says of tied parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_fxbucket.words import human_bytes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A module, or several equal ones, as one line shows them."""

    label: str
    kind: str
    count: int  # elements of one of them, tied parameters counted once
    size_bytes: int
    note: str = ""


def module_tree(model: nn.Module) -> Iterator[str]:
    """Yield the lines of a model's module tree with parameter counts and bytes, each parameter counted once a line."""
    lines = list(_tree_lines(model, type(model).__name__, 0))
    width = max(len(f"{line.label}  {line.kind}") for line in lines)
    digits = max(len(f"{line.count:,}") for line in lines)
    for line in lines:
        named = f"{line.label}  {line.kind}" if line.kind else line.label
        yield f"{named:<{width}}  {line.count:>{digits},}  {human_bytes(line.size_bytes):>10}{line.note}"


def said_of_ties(aliases: Mapping[str, str]) -> Iterator[str]:
    """What a person is told of tied parameters: ``aliases``, with the names that they are counted under."""
    for alias, fqn in list(aliases.items())[:3]:
        yield f"{alias} is tied to {fqn}: one parameter, in one entry, counted once in each total."
    if len(aliases) > 3:
        yield f"{len(aliases) - 3} more parameters are tied."


def _tree_lines(module: nn.Module, label: str, depth: int) -> Iterator[TreeLine]:
    own, kind = list(module.parameters()), "" if depth == 0 else type(module).__name__
    yield TreeLine(label, kind, sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own))
    # Not named_children(), which leaves out a module that stands here for the second time.
    alike = groupby(module._modules.items(), key=lambda item: _signature(item[1]))
    for _, same in alike:
        siblings = [(name, child) for name, child in same if child is not None]
        if siblings:
            label = "  " * (depth + 1) + _joined([name for name, _ in siblings])
            first, *below = _tree_lines(siblings[0][1], label, depth + 1)
            yield replace(first, note="  each") if len(siblings) > 1 else first
            yield from below


def _signature(module: nn.Module | None) -> object:
    """What siblings must share to be shown as one: classes, names, shapes and dtypes all the way down."""
    if module is None:
        return None
    own = tuple((name, tuple(p.shape), str(p.dtype)) for name, p in module._parameters.items() if p is not None)
    return type(module).__qualname__, own, tuple((name, _signature(child)) for name, child in module._modules.items())


def _joined(names: list[str]) -> str:
    if len(names) > 1 and all(name.isdigit() for name in names):
        return f"[{names[0]}-{names[-1]}]  {len(names)} x"
    return ", ".join(names)
