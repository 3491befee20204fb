"""What calls that write in place write and give; on fake tensors there is nothing more to do for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def written_values(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments of a call that it writes: tensors, lists of tensors, or None where one is left out."""
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(op._schema.arguments if op._schema.is_mutable else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def given_back(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives that does nothing but write some of its arguments: those. None for every other call."""
    if not op._schema.is_mutable or torch.Tag.inplace_view in op.tags:
        return None
    if any(value.alias_info is None for value in op._schema.returns):
        return None
    written = written_values(op, args, kwargs)
    return written[0] if len(op._schema.returns) == 1 else tuple(written)
