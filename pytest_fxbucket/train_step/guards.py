"""When a traced step may be used again: the arguments, the model's tensors, guards and torch's global modes are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.c10d import group_ranks
from pytest_fxbucket.compat.dtensors import spec_of
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step.live import Live, Pair, called, overlapping, refuse_sparse

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Values that a graph has as constants; they are compared by type and ``repr``, so that nan is like nan."""
Guard = Callable[[], Any] | str
"""A callable that gives a value, or the path of an attribute from the model on (``"layers.0.dropout.p"``)."""


class Arguments:
    """The leaves of one call's arguments, with their paths. Raises :class:`CaptureError` for a leaf that cannot be compared."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        paths, self.spec = pytree.tree_flatten_with_path((args, kwargs))
        self.paths = [_path(path) for path, _ in paths]
        self.leaves = [leaf for _, leaf in paths]
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(leaf, PLAIN):
                raise CaptureError(
                    f"argument {path} is a value of type {type(leaf).__name__}; the arguments of a captured step are tensors, "
                    "plain values, and tuples, lists and dicts of them"
                )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by path; one that is given twice has its first path alone."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                found.setdefault(id(leaf), (path, leaf))
        return dict(found.values())


class Guards:
    """Values that the user lists, to be compared at each call.

    Raises :class:`CaptureError` for what is neither a callable nor a path.
    """

    def __init__(self, model: nn.Module, given: Guard | Iterable[Guard]) -> None:
        self._model = model
        self._guards: list[Guard] = [given] if isinstance(given, str) or callable(given) else list(given)
        for guard in self._guards:
            if not isinstance(guard, str) and not callable(guard):
                raise CaptureError(
                    f"guards has a value of type {type(guard).__name__}, expected a callable without arguments, or the path of "
                    'an attribute of the model, such as "layers.0.dropout.p"'
                )

    def now(self) -> tuple[Hashable, ...]:
        """The present value of each guard. Raises :class:`CaptureError` for a path that leads nowhere, and for a tensor."""
        return tuple(_comparable(_name(guard), self._value(guard)) for guard in self._guards)

    def refuse_changed(self, before: tuple[Hashable, ...]) -> None:
        """Raise :class:`CaptureError` if a guard has another value than in ``before``, taken before the step was traced."""
        for guard, was, value in zip(self._guards, before, self.now(), strict=True):
            if value != was:
                raise CaptureError(
                    f"the step changes the guard {_name(guard)}, which a graph does not do again; return it, or keep it in a "
                    "buffer"
                )

    def _value(self, guard: Guard) -> Any:
        if not isinstance(guard, str):
            return guard()
        value: Any = self._model
        for name in guard.split("."):
            try:
                value = getattr(value, name)
            except AttributeError:
                raise CaptureError(f"guards has {guard!r}, but {type(value).__name__} has no attribute {name}") from None
        return value


def signature(arguments: Arguments, live: Live, guards: tuple[Hashable, ...]) -> Hashable:
    """A key that is equal for two calls if one graph fits both; ``guards`` is the result of :meth:`Guards.now`.

    Left out are the gradients that parameters have beforehand, and the process groups that the graph launches on: whether they
    matter is known only once the step is traced.
    """
    refuse_sparse(live.tensors | _given(arguments))
    # An argument that is a tensor of the model or an optimizer, a learning rate or an earlier argument is named by it, and so
    # is a rate that groups share: the graph has one input for both.
    first = {id(tensor): name for name, tensor in {**live.states(), **live.tensors}.items()}
    for name, rate in live.rates().items():
        if isinstance(rate, torch.Tensor):
            first.setdefault(id(rate), name)
    leaves = tuple(
        (_tensor(leaf), first.setdefault(id(leaf), path)) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
        for path, leaf in zip(arguments.paths, arguments.leaves, strict=True)
    )
    # With duplicates: what is tied is part of the key, as FQN and the first FQN of the same tensor.
    every = live.model.named_parameters(remove_duplicate=False)
    parameters = tuple((fqn, live.fqns[id(parameter)], _tensor(parameter)) for fqn, parameter in every)
    held = live.model.named_buffers(remove_duplicate=False)
    buffers = tuple((fqn, first[id(buffer)], _tensor(buffer)) for fqn, buffer in held)
    groups = tuple((name, _group(group, live, first)) for name, group in live.groups())
    shared = tuple(shared_memory(arguments, live))
    # Torch's modes change every operator of this thread. Rank and world size may be numbers in the step.
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    thread = torch.is_grad_enabled(), torch.get_default_dtype(), autocast
    world = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
    return str(arguments.spec), leaves, parameters, buffers, groups, shared, guards, thread, world, live.told


def shared_memory(arguments: Arguments, live: Live) -> list[Pair]:
    """Pairs of arguments, parameters, buffers and gradients that share memory, by their names in sentences."""
    return list(overlapping(live.tensors | _given(arguments)))


def _given(arguments: Arguments) -> dict[str, torch.Tensor]:
    return {called("batch", path): tensor for path, tensor in arguments.tensors().items()}


def plain_values(group: dict[str, Any]) -> dict[str, str]:
    """The values of a parameter group as text, without its parameters and without its learning rate, which is live."""
    return {key: repr(value) for key, value in group.items() if key not in ("params", "lr")}


def has_groups(ranks: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether this process has process groups of these names, each of these global ``ranks``."""
    try:
        return all(group_ranks(name) == members for name, members in ranks.items())
    except KeyError:
        return False


def _comparable(name: str, value: Any) -> Hashable:
    """A snapshot of the guard's ``value``: a list that is changed later does not change it."""
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            raise CaptureError(f"the guard {name} gives a tensor; make it a plain value, or an argument of the step")
        try:
            hash(leaf)
        except TypeError:
            raise CaptureError(
                f"the guard {name} gives a value of type {type(leaf).__name__}, which has no hash; make it a plain value, or a "
                "tuple, list or dict of them"
            ) from None
    return str(spec), tuple((type(leaf), repr(leaf)) if isinstance(leaf, PLAIN) else leaf for leaf in leaves)


def _name(guard: Guard) -> str:
    return guard if isinstance(guard, str) else str(getattr(guard, "__qualname__", type(guard).__name__))


def _group(group: dict[str, Any], live: Live, first: Mapping[int, str]) -> Hashable:
    rate = group.get("lr")
    names = tuple(live.fqns[id(parameter)] for parameter in group["params"])
    return (
        names,
        # A rate is an input of the graph: of a tensor its form and whose it is count, of a number only that there is one.
        (_tensor(rate), first[id(rate)]) if isinstance(rate, torch.Tensor) else rate is not None,
        *plain_values(group).items(),
    )


def _tensor(tensor: torch.Tensor) -> Hashable:
    placed = str(spec_of(tensor))
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor), placed


def _path(path: Any) -> str:
    """``[0][1]`` of (args, kwargs) is ``args[1]``, ``[1]['x']`` is ``x``, ``[1]['args']`` is ``kwargs['args']``."""
    whole = str(pytree.keystr(path))
    if whole.startswith("[0]"):
        return f"args{whole[3:]}"
    # Keywords of these names would be called as others are.
    name, text = path[1].key, whole.removeprefix("[1]")
    return f"kwargs{text}" if name in ("args", "kwargs") else text.replace("['", "", 1).replace("']", "", 1)
