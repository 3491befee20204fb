"""What kind of operator a node calls, by the operator's schema, never by the node's name; a graph's results; dtype names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from torch import fx

Fact = TypeVar("Fact")
_VIEWS_BY_TABLE = frozenset({"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"})
"""Operators whose result shares its input's storage although their schema is silent."""
MAYBE_VIEWS = frozenset({"aten::reshape", "aten::contiguous", "aten::flatten", "aten::to", "aten::view_as"})
"""Operators that give a view if they can, and else a copy."""


def overload(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that ``node`` calls, or None for anything else (placeholders, Python functions)."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return node.target
    return None


def by_operator(read: Callable[[torch._ops.OpOverload], Fact], otherwise: Fact) -> Callable[[fx.Node], Fact]:
    """What ``read`` says of the operator that a node calls, asked once for each operator; ``otherwise`` if it calls none.

    Schemas are slow to read, and a graph of 50,000 nodes calls some 50 operators.
    """
    # By id, since hashing an operator is slow, too. The operator is kept in the value, so that its id is not used again.
    known: dict[int, tuple[torch._ops.OpOverload, Fact]] = {}

    def fact(node: fx.Node) -> Fact:
        found = known.get(id(node.target))
        if found is None:
            op = overload(node)
            if op is None:
                return otherwise
            found = known[id(op)] = op, read(op)
        return found[1]

    return fact


def order_arguments(graph: fx.Graph) -> fx.Graph:
    """Give each operator in ``graph`` its arguments as its schema has them: by place where it can, by name in its order.

    Nothing else changes. Tracers write them so; a pass may name any of them, in any order, and a node's inputs have that order.
    """
    for node in graph.nodes:
        names = _places_and_names(node) if node.kwargs else None
        if names is None:
            continue
        places, by_name = names
        args, kwargs = list(node.args), dict(node.kwargs)
        last = max((number for number, (name, _) in enumerate(places) if name in kwargs), default=-1)
        args += [kwargs.pop(name, default) for name, default in places[len(args) : last + 1]]
        ordered = {name: kwargs[name] for name in (*by_name, *kwargs) if name in kwargs}
        if len(args) != len(node.args) or list(ordered) != list(node.kwargs):
            node.args, node.kwargs = tuple(args), ordered
    return graph


def _argument_names(op: torch._ops.OpOverload) -> tuple[list[tuple[str, Any]], list[str]]:
    """(name, default) of the arguments that have a place, and names of the others."""
    arguments = op._schema.arguments
    placed = [(a.name, a.default_value if a.has_default_value() else None) for a in arguments if not a.kwarg_only]
    return placed, [a.name for a in arguments if a.kwarg_only]


_places_and_names = by_operator(_argument_names, None)


def is_view(node: fx.Node) -> bool:
    """Whether ``node``'s result shares the storage of its first input and writes nothing."""
    return _is_view(node)


def operator_name(node: fx.Node) -> str:
    """Name of the operator that ``node`` calls, without its overload (``aten::mm``); empty for anything else."""
    return _name(node)


def is_view_operator(op: torch._ops.OpOverload) -> bool:
    """Whether ``op``'s result shares the storage of its first input, and ``op`` writes nothing."""
    name = op._schema.name
    if name in _VIEWS_BY_TABLE or name in MAYBE_VIEWS:
        return True
    aliased = [argument.alias_info for argument in op._schema.arguments if argument.alias_info is not None]
    returned = [value.alias_info for value in op._schema.returns if value.alias_info is not None]
    return bool(aliased and returned) and not any(info.is_write for info in aliased)


_is_view = by_operator(is_view_operator, False)
UNWRITTEN = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
"""Operators that give memory as it is: its bits say nothing until they are written."""
_name = by_operator(lambda op: str(op._schema.name), "")


def returns_written(node: fx.Node) -> bool:
    """Whether ``node``'s result is the one tensor that it wrote, as that of ``copy_`` or of an ``out=`` form is."""
    op = overload(node)
    if op is None or len(op._schema.returns) != 1:
        return False
    info = op._schema.returns[0].alias_info
    return info is not None and info.is_write


def held_by(root: object, name: str) -> Any:
    """What ``root`` has by the dotted ``name``, as ``get_attr`` nodes give it; None if it has nothing of that name."""
    try:
        return attrgetter(name)(root)
    except AttributeError:
        return None


def dtype_name(dtype: object) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def returned(output: fx.Node) -> list[Any]:
    """What the graph returns, a single value as one."""
    values: Any = output.args[0]
    return list(values) if isinstance(values, (list, tuple)) else [values]
