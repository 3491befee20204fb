"""What a traced step is good for: everything that tracing bakes into its graph."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step.sharing import Pair, called, overlapping

if TYPE_CHECKING:
    from pytest_fxbucket.train_step.live import Live
    from pytest_fxbucket.train_step.reading import Name

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Values that are baked into a graph, and compared."""


class Arguments:
    """Arguments of one call, as leaves of their containers. Raises :class:`CaptureError` for a leaf that cannot be compared."""

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
        """Tensors by path; one that is there twice is there under its first."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                found.setdefault(id(leaf), (path, leaf))
        return dict(found.values())


def signature(arguments: Arguments, live: Live, around: Mapping[Name, object]) -> Hashable:
    """Equal for two calls exactly if one graph does for both, but for which parameters have a gradient beforehand.

    ``around`` is what :func:`around_of` gives.
    """
    first = {id(tensor): name for name, tensor in live.tensors.items()}
    leaves = tuple(
        (_tensor(leaf), first.setdefault(id(leaf), path)) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
        for path, leaf in zip(arguments.paths, arguments.leaves, strict=True)
    )
    modules = tuple((fqn, type(module)) for fqn, module in live.model.named_modules())
    tied = tuple((fqn, live.fqns[id(p)]) for fqn, p in live.model.named_parameters(remove_duplicate=False))
    tensors = tuple((fqn, _tensor(tensor)) for fqn, tensor in (live.params | live.buffers).items())
    groups = tuple((name, _group(group, live)) for name, group in live.groups())
    shared = tuple(shared_memory(arguments, live))
    return str(arguments.spec), leaves, modules, tied, tensors, groups, shared, tuple(around.items()), _around()


def shared_memory(arguments: Arguments, live: Live) -> list[Pair]:
    """Pairs of arguments, parameters, buffers and gradients that share memory, by what they are called."""
    given = {called("batch", path): tensor for path, tensor in arguments.tensors().items()}
    return list(overlapping(live.tensors | given))


def plain_values(group: dict[str, Any]) -> dict[str, str]:
    """What a parameter group says besides its parameters and its learning rate, which is live."""
    return {key: repr(value) for key, value in group.items() if key not in ("params", "lr")}


def _group(group: dict[str, Any], live: Live) -> Hashable:
    rate = group.get("lr")
    names = tuple(live.fqns[id(parameter)] for parameter in group["params"])
    return (
        names,
        _tensor(rate) if isinstance(rate, torch.Tensor) else type(rate) is not type(None),
        *plain_values(group).items(),
    )


def _tensor(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)


def _around() -> Hashable:
    """What the thread says about every operator."""
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.get_default_dtype(), autocast


def _path(path: Any) -> str:
    """``[0][1]`` of (args, kwargs) is ``args[1]``, ``[1]['x']`` is ``x``."""
    whole = str(pytree.keystr(path))
    if whole.startswith("[0]"):
        return f"args{whole[3:]}"
    return whole.removeprefix("[1]").replace("['", "", 1).replace("']", "", 1)
