"""Which dtype an operator gives before it is written into a tensor of another one: in place casts, out of place does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

_known: dict[tuple[Any, ...], list[Any]] = {}
"""By operator and kinds of arguments: asking costs a call, and optimizers ask the same for every parameter."""


def result_dtypes(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Dtype of each result of ``op``; a list of them for a list of tensors. Arguments: nodes with fake values, and numbers."""
    call = fx.node.map_arg((tuple(args), dict(kwargs)), lambda node: node.meta["val"])
    columns: tuple[int, ...] = ()
    if isinstance(args[0], (list, tuple)):
        columns, first = _columns(call)
        call = _picked(call, first)
    key = (op, columns, _kind(call))
    if key not in _known:
        shown_args, shown_kwargs = _shown(call)
        result = op(*shown_args, **shown_kwargs)
        _known[key] = [_dtype(part) for part in (result if isinstance(result, tuple) else (result,))]
    return [[found[i] for i in columns] if isinstance(found, list) else found for found in _known[key]]


def _columns(call: Any) -> tuple[tuple[int, ...], list[int]]:
    """Lists of a foreach call go together; gives each place's column among the different ones, and where those first stand."""
    lists = [arg for arg in (*call[0], *call[1].values()) if isinstance(arg, (list, tuple)) and arg]
    different: dict[Any, int] = {}
    first: list[int] = []
    column: list[int] = []
    for place, items in enumerate(zip(*lists, strict=False)):
        kind = _kind(items)
        if kind not in different:
            different[kind] = len(first)
            first.append(place)
        column.append(different[kind])
    return tuple(column), first


def _picked(call: Any, places: list[int]) -> Any:
    def of(arg: Any) -> Any:
        return [arg[i] for i in places] if isinstance(arg, (list, tuple)) and arg else arg

    return tuple(map(of, call[0])), {name: of(arg) for name, arg in call[1].items()}


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim() == 0, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    return type(value) if isinstance(value, (int, float, complex, torch.SymFloat, torch.SymInt)) else repr(value)


def _shown(value: Any) -> Any:
    """Live numbers as some number of their type."""
    if isinstance(value, torch.SymFloat):
        return 1.0
    if isinstance(value, (list, tuple)):
        return type(value)(map(_shown, value))
    return {name: _shown(item) for name, item in value.items()} if isinstance(value, dict) else value


def _dtype(value: Any) -> Any:
    return [_dtype(item) for item in value] if isinstance(value, (list, tuple)) else value.dtype
