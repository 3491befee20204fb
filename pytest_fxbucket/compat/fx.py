"""Graphs, nodes and what tracers write into them (``torch.fx``, in torch 2.11 to 2.15)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

inputs_of: Callable[[fx.Node], Mapping[fx.Node, None]] = attrgetter("_input_nodes")
"""Like ``node.all_input_nodes``, each node once and in order, at a tenth of the cost; the mapping is live, not a copy."""


def made_of(node: fx.Node, by: str) -> Any:
    """An item of ``meta["from_node"]``, which says that the pass ``by`` made a node in place of ``node``."""
    from torch.fx.traceback import NodeSource, NodeSourceAction

    return NodeSource(node, by, [NodeSourceAction.CREATE, NodeSourceAction.REPLACE])


# The code that a call of a graph module runs (``torch.fx.GraphModule``, its hooks, its code generator; torch 2.11 to 2.15).


_TORCH = str(Path(torch.__file__).parent) + os.sep


def why_not_its_graph(module: object) -> str:
    """Why calling ``module`` would run something else than its graph, as a clause; empty if it would not."""
    if not isinstance(module, fx.GraphModule):
        return ""
    # fx compiles a graph's code under this file name, as the forward of a class that the one module has for itself.
    forward: Any = type(module).forward
    code: CodeType | None = getattr(forward, "__code__", None)
    # Until a lazy module is called first, its class has a forward that compiles the graph and calls that.
    is_own = forward is _LazyGraphModule._lazy_forward or (code is not None and code.co_filename.startswith("<eval_with_key>"))
    if "forward" in vars(module) or not is_own:
        return "has a forward that is not its graph's"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "has hooks, which run later in Python"
    codegen = module.graph._codegen
    is_torchs = type(codegen).__module__.startswith("torch.") and "_gen_python_code" not in vars(codegen)
    if getattr(codegen, "_body_transformer", None) is not None or not is_torchs:
        return "has code that is changed when it is generated"
    if odd := next((node.name for node in module.graph.nodes if not node.name.isidentifier()), ""):
        return f"has code in the name of a node, {odd[:40]!r}"
    called, wrapped = type(module).__call__, getattr(module, "_wrapped_call", None)
    # A wrapper may say that it is of torch's module: its code tells where it was written.
    is_own = called.__code__.co_filename.startswith(_TORCH) and "_wrapped_call" not in vars(module)
    is_own = is_own and (wrapped is None or (type(wrapped) is fx.graph_module._WrappedCall and wrapped.cls_call is None))
    if module._compiled_call_impl is not None or not is_own:
        return "has a call that is not its graph's"
    return ""


def uncompiled(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """``graph`` as a module that is compiled when first called, which is most of its cost (``torch.fx._lazy_graph_module``)."""
    return _LazyGraphModule(root, graph)


# What tracers say of a graph's inputs: dynamo's source (``Node._dynamo_source``), AOTAutograd's descriptors (``meta["desc"]``,
# ``torch._functorch._aot_autograd.descriptors``); in torch 2.11 to 2.15. Read by attribute: nothing private is imported.


def parameter_named(node: fx.Node) -> str | None:
    """FQN of the parameter that the input ``node`` is, as its tracer spells it; None if the tracer names no parameter."""
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
    """Whether the input ``node`` of a backward graph is a value that the forward graph computed, or a gradient."""
    return "original_aten" in node.meta or type(node.meta.get("desc")).__name__ == "TangentAOTInput"


def gradients_named(output: fx.Node, count: int) -> list[str | None]:
    """For each of ``count`` returned values the FQN of the parameter whose gradient it is by the tracer's word; else None."""
    described: Any = output.meta.get("desc")
    if not isinstance(described, (list, tuple)) or len(described) != count:
        return [None] * count
    of: list[Any] = [getattr(one, "grad_of", None) for one in described]
    return [str(one.target) if type(one).__name__ == "ParamAOTInput" else None for one in of]


# ``fxbucket::after`` gives a tensor as it is, and makes its readers depend on other tensors too: it keeps an order of nodes
# through later compilers.
#
# torch's own operator for this, ``control_deps`` (``torch._inductor.fx_passes.control_dependencies``, in torch 2.11 to 2.15),
# breaks the graph under dynamo and is traced away by AOT autograd, so it only works in graphs given to inductor directly. A
# view by an operator of our own survives dynamo, AOT autograd and inductor. None of them moves readers of the view before it,
# or what it reads behind it.


# A list, since inductor moves an operator next to its only reader (reorder_for_locality), but never an item of a list.
_SCHEMA = "after(Tensor(a -> *) x, Tensor[] done) -> Tensor(a)[]"


def _after(x: torch.Tensor, done: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``[x]`` as a view on the same storage; ``done`` are not read, they need only be computed before."""
    return [torch.ops.aten.alias.default(x)]


def _functional(context: Any, x: torch.Tensor, done: Sequence[torch.Tensor]) -> Any:
    """Functionalize by calling the operator as it is: torch refuses views that are no ATen operators, unless it is told how."""
    with context.redispatch_to_next():
        result = after(*context.unwrap_tensors((x, list(done))))
    return context.wrap_tensors(result)


_library: Any = torch.library.Library("fxbucket", "DEF")
_library.define(_SCHEMA)
_library.impl("after", _after, "CompositeExplicitAutograd")
after: torch._ops.OpOverload = torch.ops.fxbucket.after.default
after.py_functionalize_impl(_functional)
