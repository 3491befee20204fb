"""Expressions by number, shared by all graphs that are compared, and the facts of operators that go into expressions.

Equal numbers mean equal expressions, in whichever graph (hash-consing: A. P. Ershov, 1958).

An expression is a tuple: its operator's name, then the numbers of the expressions that it is made of, and constants. Every int
in it, at any depth, is the number of another expression. Integers that are values stand in a :class:`Const` or a
:class:`SourceBytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import Effects, effects_of
from pytest_fxbucket.graph.movement import moves_data, pads
from pytest_fxbucket.graph.ops import is_view
from pytest_fxbucket.graph.walks import reached

if TYPE_CHECKING:
    from torch import fx

UNDEFINED, ZERO = 0, 1
"""Numbers of memory that nobody wrote, and of zeros; the same as in :mod:`pytest_fxbucket.graph.contents`."""
Key = tuple[Any, ...]
LIST = "["
"""First item of an expression that is a list of others."""


class Const(NamedTuple):
    """A constant: two are equal only if they are of one type and print the same, so 0.0 is neither -0.0 nor 0."""

    type: str
    text: str


class SourceBytes(NamedTuple):
    """A run of bytes: which bytes of a source lie where in a value. Offsets and lengths are in bytes."""

    offset: int
    length: int
    rank: int
    """Index of the rank that holds them, -1: this one."""
    start: int
    """Offset in the source."""
    form: int
    """Number of the dtype that the source has there (:func:`~pytest_fxbucket.graph.contents.dtype_of`)."""
    times: int = 1
    """How many such runs follow each other, each of the next rank."""


class ExpressionTable:
    """Every expression of the graphs that are compared."""

    def __init__(self) -> None:
        # In the order of UNDEFINED and ZERO.
        self.keys: list[Key] = [("undefined",), ("zeros",)]
        self._numbers: dict[Key, int] = {key: number for number, key in enumerate(self.keys)}
        self.facts: dict[int, Any] = {}
        """Fake values of some expressions, from the node where each was met first (in the graph before, if it is there)."""
        self.left: dict[int, str] = {}
        """Expressions of operators that cannot be followed, each with the reason."""

    def __len__(self) -> int:
        return len(self.keys)

    def number(self, key: Key) -> int:
        """The number of the expression ``key``."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.keys)
            self.keys.append(key)
        return found

    def parts(self, number: int) -> list[int]:
        """Numbers of the expressions that the expression ``number`` is made of, in order."""
        return list(_numbers(self.keys[number]))

    def within(self, numbers: Iterable[int]) -> set[int]:
        """``numbers``, and all that they are made of."""
        return set(reached(numbers, self.parts))


_consts: dict[tuple[type, Any], Const] = {}


def const(value: Any) -> Const:
    """``value``, which contains no node, as a constant. Raises TypeError for an object that can only be told by its address."""
    # Known constants are kept by type and value, since True == 1 and both hash alike.
    kind = type(value)
    if kind not in PLAIN:  # 0.0 and -0.0 are equal, and a NaN is not equal to itself
        text = repr(value)
        if " at 0x" in text:
            raise TypeError(f"a {kind.__name__} among its arguments has no value that can be compared")
        return Const(kind.__name__, text)
    found = _consts.get((kind, value))
    if found is None:
        found = _consts[kind, value] = Const(kind.__name__, repr(value))
    return found


PLAIN = frozenset({type(None), type(...), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of constants that are the same whenever they are equal."""


def _numbers(key: Key) -> Iterator[int]:
    for item in key:
        if type(item) is int:
            yield item
        elif type(item) is tuple:
            yield from _numbers(item)


# What the walk must know of an operator, read once off its schema.


_SAME = frozenset({"aten::detach", "aten::alias"})
"""Operators that give their input unchanged: the same memory, seen in the same way."""
_COPIES = frozenset({"aten::view", "aten::_unsafe_view"})
"""Operators that share one label, since they give the same elements in the same shape."""
_MAY_COPY = frozenset(f"aten::{name}" for name in ("reshape", "contiguous", "flatten", "to", "view_as"))
"""Operators that give a view if they can, and else a copy."""
_LAZY = frozenset(
    f"aten::{name}" for name in ("_conj", "_neg_view", "conj", "resolve_conj", "resolve_neg", "adjoint", "mH", "matrix_H")
)
"""Operators of lazy conjugation and negation: the numbers that a tensor shows are not those in its memory."""
_OF_MEMORY = frozenset(f"aten::{name}" for name in ("stride", "sym_stride", "sym_storage_offset", "is_contiguous"))
"""Operators that return how a tensor lies in memory, of which expressions say nothing."""
_NEW = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "zeros", "new_zeros"))


@dataclass(frozen=True, slots=True)
class OperatorEffect:
    """What calls of one target have in common, whatever the arguments."""

    label: str
    """Name and overload."""
    defaults: tuple[tuple[str, Const | None], ...]
    """Names of its arguments, each with its default; None if it must be given."""
    effects: Effects
    is_plain: bool
    """Whether it only computes: it writes, draws, shares and launches nothing, and does not merely move data."""
    moves: bool
    """Whether it only moves data."""
    by_memory: bool
    """Whether it sees the memory under its first input, not its elements."""
    is_new: bool
    """Whether it makes a buffer."""
    launches: collectives.Kind | None
    same: bool
    """Whether it gives its first input unchanged."""
    view: bool
    """Whether its result is always a view of its first input, so that later writes to that show in it."""
    cast: Callable[[fx.Node], Any] | None
    """For a cast, a function from its node to the dtype that it casts to."""
    by_member: bool
    """Whether it treats each member of its lists as if that were alone (foreach and fused operators)."""
    nested: bool
    """Whether a ``by_member`` operator gives several lists, each with an item for every member."""
    left: str
    """Why it cannot be followed; empty if it can."""


def read(node: fx.Node) -> OperatorEffect:
    """What is known of the target that ``node`` calls."""
    target: Any = node.target
    effects, moves = effects_of(node), moves_data(node)
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        name = str(schema.name)
        label = f"{name}.{target._overloadname}" if target._overloadname else name
        defaults = tuple((a.name, const_of(a.default_value) if a.has_default_value() else None) for a in schema.arguments)
        if not effects.gives and not effects.writes:
            effects = replace(effects, chained=True)  # It gives and writes nothing, so it must act on the world.
        view = is_view(node) and name not in _MAY_COPY and name not in ("aten::unsafe_split", "aten::unsafe_split_with_sizes")
        moves = (moves or pads(node)) and name not in _LAZY
    else:
        name, defaults, view = "", (), target is getitem
        label = _python_name(target)
    launches, is_wait = collectives.launch_kind(node), collectives.is_wait(node)
    acts = effects.writes or effects.shares or effects.shares_all or effects.everything or effects.random or effects.chained
    left = _left(node, effects)
    by_member = name.startswith(("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad"))
    # One tensor with a number for each member is no argument of a member alone.
    by_member = by_member and not any(a.name == "scalars" and str(a.type) == "Tensor" for a in target._schema.arguments)
    return OperatorEffect(
        # view.dtype sees the same bytes as other elements, so it is no plain view.
        label="aten::view" if name in _COPIES and label != "aten::view.dtype" else label,
        defaults=defaults,
        effects=effects,
        is_plain=not (acts or moves or launches or is_wait or by_member or left),
        moves=moves,
        by_memory=name.startswith(("aten::as_strided", "aten::_reshape_alias", "inductor::")),
        is_new=name in _NEW,
        launches=launches,
        same=name in _SAME or is_wait,
        view=view,
        cast=_casts(name),
        by_member=by_member,
        nested=name.startswith("aten::_fused_"),
        left=left,
    )


def const_of(value: Any) -> Any:
    """A default value in the form that a given argument has in expressions."""
    return ("[", *map(const_of, value)) if isinstance(value, (list, tuple)) else const(value)


def _left(node: fx.Node, effects: Effects) -> str:
    if effects.joins:
        return f"{node.target} puts one storage in another's place"
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _OF_MEMORY:
        return f"{node.target} sees how memory lies"
    # What a higher-order operator does is in its subgraphs, which are among its arguments.
    if isinstance(node.target, torch._ops.HigherOrderOperator) or not effects.barrier:
        return ""
    return f"{node.target} {effects.barrier}"


def _python_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{target.namespace}::{target.__name__}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _casts(name: str) -> Callable[[fx.Node], Any] | None:
    # With any further argument a cast does more, for example to another device or memory format: then it is told as a call.
    if name == "prims::convert_element_type":
        return lambda node: node.args[1] if len(node.args) == 2 else None
    if name == "aten::_to_copy":
        return lambda node: node.kwargs.get("dtype") if len(node.args) == 1 and _given(node) == {"dtype"} else None
    return None


def _given(node: fx.Node) -> set[str]:
    """Names of the arguments by name that say something: None and False are the defaults of a cast's."""
    return {name for name, value in node.kwargs.items() if value is not None and value is not False}
