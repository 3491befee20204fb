"""What a traced step cannot be: each refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat import trace
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.ops import overload

if TYPE_CHECKING:
    from torch import fx, nn


def refuse_constants(graph_module: fx.GraphModule, model: nn.Module) -> None:
    """A tensor that the model holds, but as no input of the step, has no value under tracing: the graph could not run."""
    parameters = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    for node in graph_module.graph.nodes:
        if node.op != "get_attr" or not trace.is_fake(getattr(graph_module, node.target)):
            continue
        fqn = parameters.get(id(getattr(graph_module, node.target)))
        if fqn is not None:
            raise CaptureError(f"{_where(node)} reads parameter {fqn} past its module's attribute, so it would not be gathered")
        raise CaptureError(
            f"{_where(node)} uses a tensor that is neither parameter, buffer nor input of the step; "
            "register it with register_buffer"
        )


def refuse_drawing_again(graph_module: fx.GraphModule, recomputed: Sequence[str]) -> None:
    """Random numbers that backward draws again would be others than forward's."""
    for node in graph_module.graph.nodes if recomputed else ():
        op = overload(node)
        if op is not None and node.meta.get("autograd_backward") and _draws(node, op):
            raise CaptureError(
                f"{_where(node)} draws random numbers ({op}) within what [step] checkpoint computes again, where they would be "
                "others; leave the module out of it, or set its probability to 0"
            )


def _draws(node: fx.Node, op: torch._ops.OpOverload) -> bool:
    """Whether ``node`` draws random numbers; attention says so by its dropout, not by its tag."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = dict(zip((argument.name for argument in op._schema.arguments), node.args, strict=False)) | node.kwargs
    return all(given.get(a.name, a.default_value) != 0.0 for a in op._schema.arguments if a.name == "dropout_p")


def _where(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or [""])
    return f"module {stack[-1]}" if stack[-1] else "the root module or the loss"
