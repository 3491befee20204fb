"""A joint graph that AOT autograd traced, with the roles that its own descriptors give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.given_graphs import TracedStep
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.modules import within

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

_ROLES = {"param": "param", "buffer": "buffer", "plain": "batch", "tangent": "batch"}


def joint_step(gm: fx.GraphModule, module: nn.Module, batch: Sequence[Tensor], *, inner: str = "") -> TracedStep:
    """What a ``[graph]`` factory returns for ``gm``, the graph that ``aot_export_joint_with_descriptors`` made of ``module``.

    ``module`` gives a scalar loss of ``batch``; its parameters and buffers, DTensors or not, are the step's, and begin with the
    values that they have. ``inner`` is the name that the model has in ``module``: FQNs and module names of nodes go without it.
    ``gm`` is changed: it no longer takes or gives those parts of DTensors that are no tensors. Raises
    :class:`CaptureError` for a graph without descriptors, or with outputs besides loss and gradients.
    """
    from pytest_fxbucket.compat.descriptors import takes_flat

    held: dict[str, Any] = dict([*module.named_parameters(), *module.named_buffers()])
    inputs, roles, fqns = [], [], []
    for node, kind, name in _inputs(gm):
        if kind == "part":
            continue
        roles.append(_ROLES[kind])
        fqns.append(name.removeprefix(f"{inner}.") if kind in ("param", "buffer") else name or kind)
        inputs.append(_value(node, kind, name, held, batch))
    outputs, values, given = ["loss"], [""], []
    for value, kind, name in _outputs(gm):
        if kind == "part":
            continue
        given.append(value)
        if kind == "grad":
            outputs.append("grad")
            values.append(name.removeprefix(f"{inner}."))
    gm.graph.output_node().args = (tuple(given),)
    # Only the output read such a part, which it no longer returns.
    for node, kind, _ in _inputs(gm):
        if kind == "part":
            gm.graph.erase_node(node)
    takes_flat(gm.graph)
    if inner:
        _name_modules_within(inner, gm.graph)
    gm.recompile()
    return TracedStep(
        {"joint": gm},
        {"joint": tuple(inputs)},
        {"joint": {"inputs": roles, "outputs": outputs}},
        {"joint": {"inputs": fqns, "outputs": values}},
    )


def _name_modules_within(inner: str, graph: fx.Graph) -> None:
    """Leave ``inner`` out of the module names of nodes, by which passes find a plan's entries."""
    for node in graph.nodes:
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if stack := node.meta.get(key):
                node.meta[key] = {level: (within(name, inner), kind) for level, (name, kind) in stack.items()}


def _inputs(gm: fx.GraphModule) -> Sequence[tuple[fx.Node, str, str]]:
    from pytest_fxbucket.compat.descriptors import described

    found = [(node, *described(node.meta.get("desc"))) for node in gm.graph.find_nodes(op="placeholder")]
    for node, kind, name in found:
        if kind not in _ROLES and (kind != "part" or node.users.keys() - {gm.graph.output_node()}):
            raise CaptureError(
                f"the graph's input {node.name} is described as {name or kind}, where a parameter, buffer, item of the batch "
                "or tangent of the loss was expected; trace it with aot_export_joint_with_descriptors"
            )
    return found


def _outputs(gm: fx.GraphModule) -> Sequence[tuple[Any, str, str]]:
    from pytest_fxbucket.compat.descriptors import buffer_written, described, outputs_described

    node = gm.graph.output_node()
    returned: Any = node.args[0]
    pairs = list(zip(returned, outputs_described(node), strict=True))
    if buffer := next(filter(None, (buffer_written(desc) for _, desc in pairs)), ""):
        raise CaptureError(
            f"forward writes buffer {buffer}, whose new value joint_step does not take; call eval() of its module before the "
            "graph is made, or say the roles by hand in a TracedStep"
        )
    found = [(value, *described(desc)) for value, desc in pairs if value is not None]  # None: a gradient that there is not
    wanted = ("plain", "grad", "part")
    if other := next((name or kind for _, kind, name in found if kind not in wanted), None):
        raise CaptureError(f"the graph gives {other}, where a loss and gradients of parameters were expected")
    if sum(kind == "plain" for _, kind, _ in found) != 1 or found[0][1] != "plain":
        raise CaptureError("the graph gives no one value of its module first, where its loss was expected")
    return found


def _value(node: fx.Node, kind: str, name: str, held: dict[str, Any], batch: Sequence[Tensor]) -> Tensor:
    import torch
    from torch.distributed.tensor import DTensor

    if kind == "tangent":
        like = node.meta["val"]
        return torch.ones(like.shape, dtype=like.dtype)
    found: Any = batch[int(name)] if kind == "plain" else held[name]
    local: Tensor = found.to_local() if isinstance(found, DTensor) else found
    return local.detach()
