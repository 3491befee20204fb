"""From an operator that writes in place to its functional twin, by schemas alone: plain, ``out=``, foreach and fused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

OpOverload = torch._ops.OpOverload
Argument = tuple[int, str]
"""Place and name."""


@dataclass(frozen=True, slots=True)
class Twin:
    """The functional twin of an operator that writes in place."""

    op: OpOverload
    written: tuple[Argument, ...]
    """Arguments of the operator in place that it writes."""
    dropped: tuple[Argument, ...]
    """Those among them that the twin does not take: ``out=``."""
    first: int
    """Which of the twin's results is the first new value; the results before it are results of the operator in place, too."""
    results: int
    """How many results the twin has."""
    clones: bool
    """It writes clones of its arguments, so new values always have the old dtype; others promote."""


@cache
def twin_of(op: OpOverload) -> Twin | None:
    """The twin of ``op``; None if it writes nothing, changes what shape a tensor is, or has no twin."""
    arguments = op._schema.arguments
    written = tuple((i, a.name) for i, a in enumerate(arguments) if _is_written(a))
    outs = tuple((i, a.name) for i, a in enumerate(arguments) if a.is_out)
    if not written or torch.Tag.inplace_view in op.tags or (outs and outs != written):
        return None
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    for twin in _candidates(op, bool(outs)):
        schema = twin._schema
        named = [(a.name, str(a.type)) for a in schema.arguments]
        first = len(schema.returns) - len(written)
        if named == wanted and first >= 0 and not any(map(_is_written, schema.arguments)) and _fits(op, first):
            clones = schema.returns[first].name == f"{written[0][1]}_out"
            return Twin(twin, written, outs, first, len(schema.returns), clones)
    return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _fits(op: OpOverload, first: int) -> bool:
    """Whether ``op`` has as many results of its own as its twin before the new values; what it writes may follow, or not."""
    aliases = [value.alias_info is not None for value in op._schema.returns]
    return aliases[:first] == [False] * first and all(aliases[first:])


def _candidates(op: OpOverload, is_out: bool) -> Iterator[OpOverload]:
    namespace, name = op._schema.name.split("::")
    names = [name] if is_out else [name.removesuffix("_"), f"{name.removesuffix('_')}_functional"]
    for candidate in names:
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            if found is not op:
                yield found
