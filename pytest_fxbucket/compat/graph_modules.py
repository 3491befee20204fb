"""What calling a graph module runs (``torch.fx.GraphModule``, its hooks and its code generator, in torch 2.11 to 2.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from types import CodeType


def why_not_its_graph(module: object) -> str:
    """Why calling ``module`` would run something else than its graph, as a clause; empty if it would not."""
    if not isinstance(module, fx.GraphModule):
        return ""
    forward: Any = type(module).forward
    code: CodeType | None = getattr(forward, "__code__", None)
    if "forward" in vars(module) or code is None or not code.co_filename.startswith("<eval_with_key>"):
        return "has a forward that is not its graph's"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "has hooks, which run later in Python"
    if getattr(module.graph._codegen, "_body_transformer", None) is not None:
        return "has code that is changed when it is generated"
    return ""
