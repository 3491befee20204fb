"""``fxbucket::after``: a tensor as it is, once others are computed. It keeps an order of nodes through later compilers.

torch's own operator for this, ``control_deps`` (``torch._inductor.fx_passes.control_dependencies``, in torch 2.11 to 2.15),
breaks the graph under dynamo and is traced away by AOT autograd, so it only holds what inductor is given directly. A view that
is an operator of its own goes through all of them, and none moves its readers before it, or what it reads behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# A list, since inductor moves an operator next to its only reader (reorder_for_locality), but never an item of a list.
_SCHEMA = "after(Tensor(a -> *) x, Tensor[] done) -> Tensor(a)[]"


def _after(x: torch.Tensor, done: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``[x]``, its storage and all; ``done`` need only exist."""
    return [torch.ops.aten.alias.default(x)]


def _functional(context: Any, x: torch.Tensor, done: Sequence[torch.Tensor]) -> Any:
    """As it is: functionalization refuses views that are no ATen operators, unless told."""
    with context.redispatch_to_next():
        result = after(*context.unwrap_tensors((x, list(done))))
    return context.wrap_tensors(result)


_library: Any = torch.library.Library("fxbucket", "DEF")  # type: ignore[no-untyped-call]  # untyped in torch
_library.define(_SCHEMA)
_library.impl("after", _after, "CompositeExplicitAutograd")
after: torch._ops.OpOverload = torch.ops.fxbucket.after.default
after.py_functionalize_impl(_functional)
