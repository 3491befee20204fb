"""Casts that every member passes before its launch: one cast of the packed tensor does the same, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.passes.fake import fake_value

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.making import Maker


@dataclass(frozen=True, slots=True)
class Folded:
    """The casts of a bucket's members."""

    casts: tuple[fx.Node, ...]
    """Each once."""
    sources: tuple[fx.Node, ...]
    """What they cast, member by member."""
    dtype: torch.dtype

    def apply(self, make: Maker, packed: fx.Node) -> fx.Node:
        """The cast of ``packed``, by the operator that the first member was cast with."""
        target: Any = self.casts[0].target
        if operator_name(self.casts[0]) == "prims::convert_element_type":
            return make(target, packed, self.dtype)
        return make(target, packed, dtype=self.dtype)


def folded(inputs: Sequence[fx.Node], launches: Sequence[fx.Node], foldable: Callable[[fx.Node], bool]) -> Folded | None:
    """The casts that a pack of ``inputs`` can do; None if not each is one, from and to the same, for ``launches`` alone.

    Casts between floating dtypes only: what a cast to an integer gives for a number that does not fit may depend on where an
    element lies.
    """
    casts = tuple(dict.fromkeys(inputs))
    if not casts or not all(_is_cast(cast) and set(cast.users) <= set(launches) and foldable(cast) for cast in casts):
        return None
    dtypes = {(_source(cast).dtype, fake_value(cast).dtype) for cast in casts}
    if len(dtypes) > 1:
        return None
    return Folded(casts, tuple(cast.all_input_nodes[0] for cast in inputs), dtypes.pop()[1])


def _is_cast(node: fx.Node) -> bool:
    """Whether ``node`` casts a floating tensor to another floating dtype, and does nothing else that matters to a pack."""
    if operator_name(node) == "prims::convert_element_type":
        plain = not node.kwargs
    elif operator_name(node) == "aten::_to_copy":
        plain = len(node.args) == 1 and all(_is_plain(node, *item) for item in node.kwargs.items())
    else:
        return False
    return plain and len(node.all_input_nodes) == 1 and _floats(node)


def _floats(node: fx.Node) -> bool:
    source, target = _source(node).dtype, fake_value(node).dtype
    return source.is_floating_point and target.is_floating_point


def _is_plain(node: fx.Node, name: str, value: Any) -> bool:
    """Whether the argument says nothing but the dtype; the order of elements in memory does not matter to a pack."""
    if name in ("dtype", "memory_format") or value is None or value is False:
        return True
    source = _source(node)
    if name == "device":
        return torch.device(value) == source.device
    return name == "non_blocking" or (name == "layout" and value == source.layout)


def _source(node: fx.Node) -> torch.Tensor:
    return fake_value(node.all_input_nodes[0])
