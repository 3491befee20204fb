"""Which operators leave of a tensor but one element: norms, sums, and whatever else takes all elements together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.ops import by_operator

if TYPE_CHECKING:
    from torch import fx

_REDUCTION = getattr(torch.Tag, "reduction", None)  # not in every torch that is supported
_ON_LISTS = frozenset({"aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum"})
"""Reductions of each item of a list, of which no tag tells."""


def is_reduced(node: fx.Node) -> bool:
    """Whether ``node`` computes one element of all that its inputs have; of lists, one of each item.

    An operator whose name or tag says nothing is told by shapes: none that goes element by element leaves fewer elements, or
    fewer dimensions, than an input has.
    """
    if not computes(node) or _is_on_lists(node):
        return _is_on_lists(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return False
    given = [one for source in node.all_input_nodes if isinstance(one := source.meta.get("val"), torch.Tensor)]
    return _is_reduction(node) or any(one.numel() != 1 or one.ndim > value.ndim for one in given)


_is_on_lists = by_operator(lambda op: op._schema.name in _ON_LISTS, False)
_is_reduction = by_operator(lambda op: op._schema.name.endswith("norm") or _REDUCTION in op.tags, False)
