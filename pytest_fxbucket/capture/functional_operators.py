"""From an operator that writes in place to its functional twin: by schemas, with the casts that writing in place does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat import pytree

OpOverload = torch._ops.OpOverload


@dataclass(frozen=True, slots=True)
class FunctionalTwin:
    """The functional twin of an operator that writes in place."""

    op: OpOverload
    dropped: tuple[tuple[int, str], ...]
    """Arguments of the operator in place that the twin does not take (``out=``), each by place and name."""
    first: int
    """Which of the twin's results is the first new value; the results before it are results of the operator in place, too."""
    results: int
    """How many results the twin has."""
    clones: bool
    """Whether the twin writes clones of the arguments, so that new values keep the old dtype; other twins promote."""


FACTORY = ("dtype", "layout", "device", "pin_memory")
"""Arguments of an operator that makes a tensor, which its overload with ``out=`` lacks."""


@cache
def twin_of(op: OpOverload) -> FunctionalTwin | None:
    """The twin of ``op``; None if it writes nothing, changes what shape a tensor is, or has no twin."""
    arguments = op._schema.arguments
    written = [a for a in arguments if _is_written(a)]
    outs = tuple((i, a.name) for i, a in enumerate(arguments) if a.is_out)
    if not written or torch.Tag.inplace_view in op.tags or (outs and not all(a.is_out for a in written)):
        return None
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    for twin in _candidates(op, bool(outs)):
        schema = twin._schema
        own = {name for name, _ in wanted}
        # A factory that makes its tensor anew must be told what the tensor of ``out=`` says by itself.
        asked = [a for a in schema.arguments if not (outs and a.name in FACTORY and a.name not in own)]
        named = [(a.name, str(a.type)) for a in asked]
        first = len(schema.returns) - len(written)
        # ``op`` must return the twin's own results first, and nothing but what it writes, if anything, behind them.
        aliases = [value.alias_info is not None for value in op._schema.returns]
        fits = first >= 0 and aliases[:first] == [False] * first and all(aliases[first:])
        if named == wanted and fits and not any(map(_is_written, schema.arguments)):
            # Twins that torchgen generates run the operator on clones, and call each new value after its argument, with
            # ``_out``.
            clones = schema.returns[first].name == f"{written[0].name}_out"
            return FunctionalTwin(twin, outs, first, len(schema.returns), clones)
    return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _candidates(op: OpOverload, is_out: bool) -> Iterator[OpOverload]:
    namespace, name = op._schema.name.split("::")
    # An overload with ``out=`` has its twin under its own name. ``add_`` has ``add``; an operator without underscore that
    # writes has ``<name>_functional``.
    names = [name] if is_out else [name.removesuffix("_"), f"{name.removesuffix('_')}_functional"]
    for candidate in names:
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            if found is not op:
                yield found


# Which dtype an operator gives before it is written into a tensor of another one: in place casts, out of place does not.


_known: dict[tuple[Any, ...], list[Any]] = {}
"""By operator and kinds of arguments: asking costs a call, and optimizers ask the same for every parameter."""


def result_dtypes(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Dtype of each result of ``op``; a list of them for a list of tensors. Arguments: nodes with fake values, and numbers."""
    call = fx.node.map_arg((tuple(args), dict(kwargs)), lambda node: node.meta["val"])
    columns: tuple[int, ...] = ()
    if isinstance(args[0], (list, tuple)):
        # Optimizers hand over hundreds of tensors of few kinds: one of each kind is asked for.
        columns, first = _columns(call)
        args, kwargs = call
        call = tuple(_picked(arg, first) for arg in args), {name: _picked(arg, first) for name, arg in kwargs.items()}
    key = (op, columns, _kind(call))
    if key not in _known:
        shown_args, shown_kwargs = with_some_numbers(call)
        result = op(*shown_args, **shown_kwargs)
        _known[key] = [_dtype(part) for part in (result if isinstance(result, tuple) else (result,))]
    return [[found[i] for i in columns] if isinstance(found, list) else found for found in _known[key]]


def _columns(call: Any) -> tuple[tuple[int, ...], list[int]]:
    """The number of the kind of each place in the lists of a foreach call, and the first place of each kind.

    A foreach call takes one item of each list at a time, so a place's kind is that of its items together.
    """
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


def _picked(arg: Any, places: list[int]) -> Any:
    return [arg[i] for i in places] if isinstance(arg, (list, tuple)) and arg else arg


def _kind(value: Any) -> Any:
    # Type promotion looks at a tensor's dtype and at whether it has dimensions, not at sizes; of a number at its Python type.
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim() == 0, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    return type(value) if isinstance(value, (int, float, complex, torch.SymFloat, torch.SymInt)) else repr(value)


def with_some_numbers(value: Any) -> Any:
    """``value`` with some number for each live one: only shapes and dtypes are asked for."""
    return pytree.tree_map(lambda leaf: 1.0 if isinstance(leaf, torch.SymFloat) else leaf, value)


def _dtype(value: Any) -> Any:
    return [_dtype(item) for item in value] if isinstance(value, (list, tuple)) else value.dtype


def written_values(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments of a call that it writes: tensors, lists of tensors, or None where one is left out."""
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(op._schema.arguments if op._schema.is_mutable else ())
        if _is_written(argument)
    ]


def given_back(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The written arguments of a call, if it gives nothing but those; None for every other call."""
    if not op._schema.is_mutable or torch.Tag.inplace_view in op.tags:
        return None
    if any(value.alias_info is None for value in op._schema.returns):
        return None
    written = written_values(op, args, kwargs)
    return written[0] if len(op._schema.returns) == 1 else tuple(written)


# The fake value of a node, and where it lies in its memory.


def value_of_new(node: fx.Node) -> Any:
    """What the operator that ``node`` calls gives for the fake values of its arguments."""
    target: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    return target(*args, **kwargs)


def same_place(owner: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are the same elements in the same order of one memory."""
    if owner is other:
        return True
    a, b = owner.meta.get("val"), other.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _layout(a) == _layout(b)


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()


def overlap(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes of one memory may have an element in common: by the first and the last of each."""
    (low, high), (low_2, high_2) = extent(one.meta["val"]), extent(other.meta["val"])
    return low < high_2 and low_2 < high


def extent(value: torch.Tensor) -> tuple[int, int]:
    """First element of ``value`` in its storage, and the one after its last."""
    first = int(value.storage_offset())
    if value.numel() == 0:
        return first, first
    return first, first + 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
