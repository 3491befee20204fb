"""Modules that graphs call, in this process, by key; and calling one with other tensors in its parameters' places."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from torch import fx

_CALLS = ("fxbucket.call_forward.default", "fxbucket.call_backward.default")
Places = list[tuple[dict[str, Any], str, str]]
_count = count()
_known: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()


class _Kept(threading.local):
    """Of the model that this rank built last; nobody else keeps them. Ranks may be threads of one process."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}


_kept = _Kept()


def fresh_key(fqn: str) -> str:
    """A key of this process for a module called ``fqn``."""
    return f"{fqn}#{next(_count)}"


def fqn_of(key: str) -> str:
    """What people call the module."""
    return key.partition("#")[0]


def know(key: str, module: nn.Module) -> None:
    """Let graphs find ``module``, for as long as somebody else keeps it."""
    _known[key] = module


def keep_for_calls(model: nn.Module, fqns: Iterable[str]) -> None:
    """Keep those modules of a rank's own ``model``, instead of ones of those names kept before; parameters are not kept.

    Whoever needs their first values has to have taken them.
    """
    for fqn in dict.fromkeys(fqns):
        module = model.get_submodule(fqn)
        for held, name, _ in places_of(module):
            tensor = held[name]
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            held[name] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        _kept.modules[fqn] = module


def module_at(key: str) -> nn.Module:
    """The module. Raises :class:`CaptureError` where this process has none."""
    module = _kept.modules.get(key)
    module = _known.get(key) if module is None else module
    if module is None:
        raise CaptureError(
            f"the graph calls module {fqn_of(key)}, which this process has not built; build the model and hand it to "
            "keep_for_calls first"
        )
    return module


def modules_called_by(graph: fx.Graph) -> tuple[str, ...]:
    """Keys of the modules that ``graph`` calls when it runs, in order."""
    calls = (node for node in graph.nodes if node.op == "call_function" and str(node.target) in _CALLS)
    return tuple(dict.fromkeys(str(node.args[0]) for node in calls))


def names_of(module: nn.Module) -> list[str]:
    """Parameters, then buffers of ``module``, within it; of tied ones the first name."""
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def places_of(module: nn.Module) -> Places:
    """(dict, key in it, name) of every place that holds a parameter or buffer; a tied one has several, under its first name."""
    first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    return [
        (held, key, first[id(tensor)])
        for inner in module.modules()
        for held in (inner._parameters, inner._buffers)
        for key, tensor in held.items()
        if tensor is not None
    ]


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While inside, ``module`` has ``tensors``, by name, in its parameters' and buffers' places; then all is as before."""
    places = places_of(module)
    before: Sequence[Any] = [held[key] for held, key, _ in places]
    try:
        for held, key, name in places:
            held[key] = tensors[name]
        yield
    finally:
        for (held, key, _), tensor in zip(places, before, strict=True):
            held[key] = tensor
