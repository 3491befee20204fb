"""Tensors that a model holds in plain attributes, or its code in global variables: they become inputs of the graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from pytest_fxbucket.capture.names import NodeNamer
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode, storage_key
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.storages import base
from pytest_fxbucket.step.roles import Value


def unregistered_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are no parameter or buffer, by name: ``0.table``, ``0.tables[1]``, ``mytrainer.rope.TABLE``."""
    found: dict[str, torch.Tensor] = {}
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found.update(_tensors(value, f"{fqn}.{name}" if fqn else name))
    for code in dict.fromkeys(type(module).__module__ for module in model.modules()):
        for name, value in vars(sys.modules[code]).items() if code in sys.modules else ():
            if isinstance(value, torch.Tensor):
                found[f"{code}.{name}"] = value
    return found


def take_as_inputs(graph_module: fx.GraphModule, model: nn.Module, mode: FakeTensorMode, place: int) -> list[Value]:
    """Make the tensors that ``model`` holds, and that were traced as constants, inputs from number ``place`` on.

    Raises :class:`CaptureError` for one that is written, or for a constant that a gradient is asked of.
    """
    names = {id(tensor): name for name, tensor in reversed(unregistered_tensors(model).items())}
    found: dict[str, fx.Node] = {}
    values: list[Value] = []
    behind = list(graph_module.graph.nodes)[place]
    for node in graph_module.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph_module, node.target, None)
        if not isinstance(tensor, torch.Tensor) or tracing.is_fake(tensor):
            continue
        name = names.get(id(tensor), "")
        if tensor.requires_grad:
            raise CaptureError(
                f"{name or 'a tensor that the model holds'} requires grad and is used in forward, but is no "
                "parameter of the model; make it one (torch.nn.Parameter, in an attribute of its module), or detach it"
            )
        if not name:
            continue
        if name not in found:
            with graph_module.graph.inserting_before(behind):
                found[name] = graph_module.graph.placeholder(f"held_{len(found)}")
            found[name].meta["val"] = mode.from_tensor(tensor)
            values.append(Value("held", name, tuple(tensor.shape), tensor.dtype))
        node.replace_all_uses_with(found[name])
        graph_module.graph.erase_node(node)
    # An input may be read, but no write to it comes back to the model: the next step would begin with the old value.
    names_of = {node: name for name, node in found.items()}
    for node in graph_module.graph.nodes:
        if name := next((names_of[base(t)] for t in written_arguments(node) if base(t) in names_of), ""):
            raise CaptureError(
                f"{name} is written in place in forward ({node.target}), so the next step would need it, but it is no "
                "buffer; register it with register_buffer"
            )
    return values


def _tensors(value: Any, name: str, around: tuple[object, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in ``value``, which lies in all of ``around``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif any(value is one for one in around):
        return  # a list, or a dict, that contains itself
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}[{number}]", (*around, value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}[{key!r}]", (*around, value))


def refuse_other_buffers(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`CaptureError` for a buffer that is new since ``before`` forward, or has another shape or dtype."""
    for fqn, buffer in model.named_buffers():
        was = before.get(fqn)
        if was is None:
            raise CaptureError(f"buffer {fqn} is new in forward, so it is no input of the step; register it in __init__")
        if (buffer.shape, buffer.dtype) != (was.shape, was.dtype):
            raise CaptureError(
                f"buffer {fqn}, {list(was.shape)} in {was.dtype}, is replaced in forward by one of {list(buffer.shape)} in "
                f"{buffer.dtype}; only its values may change, since one graph serves all steps"
            )


def keep_buffers(model: nn.Module, before: Mapping[str, torch.Tensor], namer: NodeNamer) -> None:
    """Write the tensor that forward put in a buffer's place into the buffer ``before``, which the next step reads.

    To be called behind backward, which may need the old values.
    """
    new = {fqn: buffer for fqn, buffer in model.named_buffers() if buffer is not before[fqn]}
    # What one buffer is handed may be another one's old tensor, or a view of it, which is written here, too.
    written = {storage_key(before[fqn]) for fqn in new}
    held = {fqn: buffer.clone() if storage_key(buffer) in written else buffer for fqn, buffer in new.items()}
    for fqn, buffer in held.items():
        owner, _, name = fqn.rpartition(".")
        with torch.no_grad(), namer.inside(owner):
            before[fqn].copy_(buffer)
        setattr(model.get_submodule(owner), name, before[fqn])
