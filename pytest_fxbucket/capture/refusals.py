"""What a traced step cannot be: each refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.draws import draws
from pytest_fxbucket.compat import trace
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.collectives import is_all_gather
from pytest_fxbucket.graph.hazards import base
from pytest_fxbucket.graph.ops import overload, written_arguments

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


def refuse_written_parameters(graph_module: fx.GraphModule) -> None:
    """What is gathered is gone after its use, and what was written to it; eager keeps that in the parameter."""
    for node in graph_module.graph.nodes:
        if any(is_all_gather(base(target)) for target in written_arguments(node)):
            raise CaptureError(
                f"{_where(node)} writes a parameter in place ({node.target}) in forward, which would be lost with what was "
                "gathered, as under FSDP2; compute a new tensor of it, or write the parameter between steps"
            )


def refuse_drawing_again(expanded: Iterable[fx.Node]) -> None:
    """A sub-graph is put in behind the trace, so what it draws again in backward would be other numbers than forward's."""
    for node in expanded:
        op = overload(node)
        if op is not None and node.meta.get("autograd_backward") and draws(op, node.args, node.kwargs):
            raise CaptureError(
                f"{_where(node)} draws random numbers ({op}) in a sub-graph that is computed again in backward, where they "
                "would be others; leave the module out of what is checkpointed, or draw outside of the sub-graph"
            )


def refuse_lost(lost: Sequence[str]) -> None:
    """Raise :class:`CaptureError` for parameters that get a gradient in eager, and none in the traced step."""
    if not lost:
        return
    more = f" and {len(lost) - 1} more" if lost[1:] else ""
    module = lost[0].rpartition(".")[0]
    raise CaptureError(
        f"parameter {lost[0]}{more} gets a gradient in eager mode, but none where the step is traced; read it through its "
        f'module\'s attribute where gradients are on, or leave the module untraced: [[override]] module = ["{module}"]'
    )


def _where(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or [""])
    return f"module {stack[-1]}" if stack[-1] else "the root module or the loss"
