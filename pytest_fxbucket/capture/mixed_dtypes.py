"""Operators that torch refuses to run on the dtypes that they were traced with: fake tensors do not look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.modules import module_of

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten

_ALIKE: dict[torch._ops.OpOverload, Sequence[int]] = {
    aten.mm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.mv.default: (0, 1),
    aten.addmv.default: (0, 1, 2),
    aten.bmm.default: (0, 1),
    aten.baddbmm.default: (0, 1, 2),
    aten.linear.default: (0, 1, 2),
    aten.index_add.default: (0, 3),
    aten.index_add_.default: (0, 3),
    aten.index_copy.default: (0, 3),
    aten.index_copy_.default: (0, 3),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
}
"""Arguments, by place, that must have one dtype."""
_NORMS: dict[torch._ops.OpOverload, tuple[int, Sequence[int]]] = {
    aten.native_layer_norm.default: (0, (2, 3)),
    aten.native_group_norm.default: (0, (1, 2)),
    aten.native_batch_norm.default: (0, (1, 2, 3, 4)),
    aten._native_batch_norm_legit.default: (0, (1, 2, 3, 4)),
    aten._native_batch_norm_legit_functional.default: (0, (1, 2, 3, 4)),
    aten._native_batch_norm_legit.no_stats: (0, (1, 2)),
}
"""What is normalised, and what it is scaled, shifted and measured by: those have its dtype, or all float32 if it is shorter."""


def refuse_mixed_dtypes(graph: fx.Graph, parameters: Mapping[fx.Node, str], param_dtype: str | None) -> None:
    """Raise :class:`CaptureError`, which names the module, for the first operator of ``graph`` that could not run.

    ``parameters`` are its inputs that are, with their FQNs.
    """
    for node in graph.nodes:
        dtypes = _mixed(node)
        if dtypes:
            what = " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
            where = module_of(node) or _owner(node, parameters)
            use = "cast one to the dtype of the other, as with x.to(weight.dtype)"
            if param_dtype:
                use += f", or give the module an entry of its own: its inputs are cast to param_dtype = {param_dtype} then"
            raise CaptureError(
                f"{f'module {where}' if where else 'the step'} gives {node.target} tensors of {what}, which torch refuses to "
                f"run, eagerly too; {use}"
            )


def _owner(node: fx.Node, parameters: Mapping[fx.Node, str]) -> str:
    """The module whose parameter ``node`` is made of, the fewest operators back: a hook runs before its module does."""
    found = dict.fromkeys(node.all_input_nodes)
    for one in (queue := list(found)):
        if one in parameters:
            return parameters[one].rpartition(".")[0]
        new = [source for source in one.all_input_nodes if source not in found]
        found.update(dict.fromkeys(new))
        queue += new
    return ""


def _mixed(node: fx.Node) -> list[torch.dtype]:
    """dtypes of the arguments of ``node`` if they cannot be together, else nothing."""
    if node.target in _ALIKE:
        found = _dtypes(node, _ALIKE[node.target])
        return found if len(set(found)) > 1 else []
    if node.target in _NORMS:
        place, others = _NORMS[node.target]
        (own,), scales = _dtypes(node, [place]), _dtypes(node, others)
        fits = set(scales) <= {own} or (set(scales) == {torch.float32} and own.itemsize < 4)
        return [] if fits else [own, *scales]
    return []


def _dtypes(node: fx.Node, places: Sequence[int]) -> list[torch.dtype]:
    """dtype of each tensor argument at ``places``."""
    given = [node.args[place] for place in places if place < len(node.args)]
    values = [getattr(one, "meta", {}).get("val") for one in given]
    return [value.dtype for value in values if isinstance(value, torch.Tensor)]
