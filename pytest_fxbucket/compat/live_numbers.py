"""Numbers that a graph computes: Python's arithmetic on them becomes nodes (``torch.SymFloat``, in torch 2.11 to 2.15).

torch hands a SymFloat to a dispatch mode wherever an operator takes a number, alone or in a list. torch asks the number's
``node`` only for its kind, unless somebody wants its value. With torch's own symbols each number costs a sympy expression.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import fx

from pytest_fxbucket.errors import CaptureError


class _Kind:
    """Stands for a SymFloat's symbolic node: it has the methods that torch calls on it."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def is_float(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return False

    def guard_float(self, file: str, line: int) -> NoReturn:
        _refuse()


class LiveNumber(torch.SymFloat):
    """A Python float that ``node`` computes when the graph runs."""

    def __init__(self, node: fx.Node) -> None:
        node.meta["val"] = 1.0
        super().__init__(_Kind(node))

    def __float__(self) -> NoReturn:
        _refuse()

    __int__ = __bool__ = __round__ = __trunc__ = __float__
    __hash__ = object.__hash__


def _refuse(*_: object) -> NoReturn:
    raise CaptureError("it decides by the value of a number that is known only when the step runs")


def _recorded(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def call(number: LiveNumber, *others: Any) -> Any:
        nodes = [node_of(number), *(node_of(other) if isinstance(other, torch.SymFloat) else other for other in others)]
        # Python then asks the other operand, such as a tensor, whose operator is given the number and is traced.
        if not all(isinstance(other, (int, float, torch.SymFloat)) for other in others):
            return NotImplemented
        made = nodes[0].graph.call_function(function, tuple(reversed(nodes) if swapped else nodes))
        return LiveNumber(made)

    return call


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(LiveNumber, f"__{_name}__", _recorded(getattr(operator, _name)))
    setattr(LiveNumber, f"__r{_name}__", _recorded(getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(LiveNumber, f"__{_name}__", _recorded(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LiveNumber, f"__{_name}__", _refuse)


def node_of(number: torch.SymFloat) -> fx.Node:
    """The graph's node that computes ``number``."""
    node: fx.Node = number.node.node
    return node
