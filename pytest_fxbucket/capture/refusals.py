"""What a traced step cannot be: each refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from pytest_fxbucket.capture.draws import draws
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.errors import CaptureError, FxbucketError, text_of
from pytest_fxbucket.graph.collectives import is_all_gather
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.graph.storages import base
from pytest_fxbucket.words import some


def refuse_constants(graph_module: fx.GraphModule, model: nn.Module) -> None:
    """Raise :class:`CaptureError` for a fake tensor that became a constant of the graph: it has no value to run with."""
    parameters = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    for node in graph_module.graph.nodes:
        if node.op != "get_attr" or not tracing.is_fake(getattr(graph_module, node.target)):
            continue
        fqn = parameters.get(id(getattr(graph_module, node.target)))
        if fqn is not None:
            raise CaptureError(f"{_where(node)} reads parameter {fqn} past its module's attribute, so it would not be gathered")
        raise CaptureError(
            f"{_where(node)} uses a tensor that is neither parameter, buffer nor input of the step; "
            "register it with register_buffer"
        )


def refuse_lazy(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise :class:`CaptureError` for a tensor that a lazy module has not made yet."""
    for name, tensor in named:
        if is_lazy(tensor):
            raise CaptureError(f"{name} is made by a first forward (a lazy module); call the model once where it is built")


def refuse_unwritable(op: object) -> None:
    """Raise :class:`CaptureError` for an overload by a name that Python keeps for itself, as ``random_.from``."""
    if isinstance(op, torch._ops.OpOverload) and iskeyword(op._overloadname):
        raise CaptureError(
            f"it calls {op}, by which no graph can be written as Python; draw integers with torch.randint or randint_like"
        )


def refuse_in_place(op: torch._ops.OpOverload) -> None:
    """Raise :class:`CaptureError` for a collective of c10d, which would send the memory that fake tensors do not have."""
    if op.namespace == "c10d":
        raise in_place(str(op))


def in_place(collective: str) -> CaptureError:
    """Of a call of ``collective``, to be raised."""
    return CaptureError(
        f"it calls {collective}, which works in place and behind autograd's back; use torch.distributed._functional_collectives"
    )


def refuse_drawn(generators: Sequence[str]) -> None:
    """Raise :class:`CaptureError` if a step drew from ``generators``, which are not torch's."""
    if generators:
        raise CaptureError(
            f"it draws from {generators[0]}, and each later call would have the numbers of this one; draw from torch's, or "
            "before the step, which gets what was drawn as an argument"
        )


def refuse_written_parameters(graph_module: fx.GraphModule) -> None:
    """Raise :class:`CaptureError` for a write to a gathered parameter: it is lost with it, where eager keeps it."""
    for node in graph_module.graph.nodes:
        if any(is_all_gather(base(target)) for target in written_arguments(node)):
            raise CaptureError(
                f"{_where(node)} writes a parameter in place ({node.target}) in forward, which would be lost with what was "
                "gathered, as under FSDP2; compute a new tensor of it, or write the parameter between steps"
            )


def refuse_drawing_again(expanded: Iterable[fx.Node]) -> None:
    """Raise :class:`CaptureError` for a sub-graph's draw in backward: put in behind the trace, it would not be forward's."""
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
    module = lost[0].rpartition(".")[0]
    raise CaptureError(
        f"parameter {some(lost, 1)} gets a gradient in eager mode, but none where the step is traced; read it through its "
        f'module\'s attribute where gradients are on, or leave the module untraced: [[override]] module = ["{module}"]'
    )


def _where(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or [""])
    return f"module {stack[-1]}" if stack[-1] else "the root module or the loss"


# Operators that torch refuses to run on the dtypes that they were traced with: fake tensors do not look at dtypes.


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
"""Places of the input, and of its weight, bias and running statistics.

Those have the input's dtype; if that is shorter than float32, they may all be float32.
"""


def refuse_mixed_dtypes(graph: fx.Graph, parameters: Mapping[fx.Node, str], param_dtype: str | None) -> None:
    """Raise :class:`CaptureError`, which names the module, for the first operator of ``graph`` that could not run.

    ``parameters`` are those of its inputs that are parameters, with their FQNs.
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
    """The module of the nearest parameter that ``node`` is made of, for a node that a hook made outside of any module."""
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


def why(error: Exception, *, steps: bool, gathers: bool) -> str:
    """Why tracing a step failed with ``error``.

    ``steps``: it was in an optimizer's step. ``gathers``: parameters are gathered where they are read.
    """
    unknown = "give it to the step as an argument, or the module that has it as a buffer in model={...}"
    if gathers and "setup_context staticmethod" in str(error):
        return "parameters cannot be gathered under torch.func or vmap; call modules under fully_shard outside of them"
    text = str(error) if isinstance(error, FxbucketError) else tracing.untraceable(error, unknown)
    if steps and text and "decides by the value" in text:
        return f"{text}; a captured step may end with gradients, and the optimizer step behind it"
    return text or f"{type(error).__name__}: {text_of(error)[:300]}"
