"""Tensors that a model holds in plain attributes, or its code in global variables: constants of the graph, and said to be."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat import trace
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.hazards import base
from pytest_fxbucket.graph.ops import written_arguments

if TYPE_CHECKING:
    from torch import fx, nn


def held_tensors(model: nn.Module) -> dict[int, str]:
    """Names of tensors that are no parameter or buffer, by identity: ``0.table``, ``0.tables[1]``, ``mytrainer.rope.TABLE``."""
    found: dict[int, str] = {}
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found.update(_tensors(value, f"{fqn}.{name}" if fqn else name))
    for code in dict.fromkeys(type(module).__module__ for module in model.modules()):
        for name, value in vars(sys.modules[code]).items() if code in sys.modules else ():
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), f"{code}.{name}")
    return found


def held_constants(graph_module: fx.GraphModule, held: Mapping[int, str]) -> list[str]:
    """Names of the ``held`` tensors that the graph has as constants, in order of use.

    Raises :class:`CaptureError` for one that is written, or that a gradient is asked of.
    """
    found: dict[fx.Node, str] = {}
    for node in graph_module.graph.nodes:
        value = getattr(graph_module, node.target, None) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor) and not trace.is_fake(value):
            if value.requires_grad:
                raise CaptureError(
                    f"{held.get(id(value), 'a tensor that the model holds')} requires grad and is used in forward, but is no "
                    "parameter of the model; make it one (torch.nn.Parameter, in an attribute of its module), or detach it"
                )
            if id(value) in held:
                found[node] = held[id(value)]
        for target in written_arguments(node):
            if (name := found.get(base(target))) is not None:
                raise CaptureError(
                    f"{name} is written in place in forward ({node.target}), so the next step would need it, but it is no "
                    "buffer; register it with register_buffer"
                )
    return list(dict.fromkeys(found.values()))


def _tensors(value: Any, name: str) -> Iterator[tuple[int, str]]:
    if isinstance(value, torch.Tensor):
        yield id(value), name
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}[{number}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}[{key!r}]")
