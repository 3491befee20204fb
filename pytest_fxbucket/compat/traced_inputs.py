"""What tracers say of a graph's inputs: dynamo's source (``Node._dynamo_source``), AOTAutograd's descriptors (``meta["desc"]``,
``torch._functorch._aot_autograd.descriptors``); in torch 2.11 to 2.15. Read by attribute: nothing private is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx


def parameter_named(node: fx.Node) -> str | None:
    """FQN of the parameter that the input ``node`` is, as its tracer spells it; None if it says of no parameter."""
    import torch

    described: Any = node.meta.get("desc")
    if type(described).__name__ == "ParamAOTInput":
        return str(described.target)
    source = getattr(node, "_dynamo_source", None)
    if source is not None and isinstance(node.meta.get("example_value"), torch.nn.Parameter):
        name = source.name
        return str(name() if callable(name) else name)
    return None


def requires_grad(node: fx.Node) -> bool:
    """Whether ``node`` was traced with a tensor that requires grad (``meta["tensor_meta"]``)."""
    return bool(getattr(node.meta.get("tensor_meta"), "requires_grad", False))


def computed(node: fx.Node) -> bool:
    """Whether the input ``node`` of a backward graph is what the forward graph computed, or a gradient."""
    return "original_aten" in node.meta or type(node.meta.get("desc")).__name__ == "TangentAOTInput"


def gradients_named(output: fx.Node, count: int) -> list[str | None]:
    """Of each of ``count`` returned values: FQN of the parameter whose gradient the tracer says it is; else None."""
    described: Any = output.meta.get("desc")
    if not isinstance(described, (list, tuple)) or len(described) != count:
        return [None] * count
    of: list[Any] = [getattr(one, "grad_of", None) for one in described]
    return [str(one.target) if type(one).__name__ == "ParamAOTInput" else None for one in of]
