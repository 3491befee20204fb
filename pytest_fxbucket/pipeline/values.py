"""Arguments and results of a forward as the leaves of their containers."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import StageError

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that a graph can hold as constants beside its tensors."""


def called_with(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call: a tuple or list is positional, a dict by keyword, a tensor one argument."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise StageError(
        f"example_inputs is a value of type {type(example_inputs).__name__}, expected a tuple of arguments, or a dict of them "
        "by name"
    )


def leaves_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of a call's arguments by path, in the order of ``signature``, however they are passed; defaults are among them."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise StageError(f"the arguments do not fit forward{signature}: {error}") from error
    bound.apply_defaults()
    found, _ = pytree.tree_flatten_with_path(dict(bound.arguments))
    for path, leaf in found:
        inside = () if isinstance(leaf, (torch.Tensor, type)) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(one, torch.Tensor) for one in inside):
            raise StageError(
                f"argument {pytree.keystr(path)} is a value of type {type(leaf).__name__}, whose tensors no stage would "
                "receive; pass tensors, and tuples, lists and dicts of them"
            )
    # A path begins with the name of the argument: ``['x'][0]`` becomes ``x[0]``.
    return {re.sub(r"^\['([^']*)'\]", r"\1", pytree.keystr(path)): leaf for path, leaf in found}


def refuse_other_arguments(traced: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise :class:`StageError` for arguments that the graph was not traced for; ``traced`` may have fake tensors."""
    for path in dict.fromkeys([*traced, *given]):
        was, now = (_described(leaves, path) for leaves in (traced, given))
        if was != now:
            raise StageError(f"argument {path} is {now}, but the stages were traced with {was}; split the model for it anew")


def _described(leaves: Mapping[str, Any], path: str) -> str:
    if path not in leaves:
        return "not there"
    leaf = leaves[path]
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    strided = "" if leaf.is_contiguous() else f" with strides {list(leaf.stride())}"
    return f"a tensor of {list(leaf.shape)} in {str(leaf.dtype).removeprefix('torch.')}{strided}"


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """Stands for a tensor in nested arguments or results; in a result ``number`` is its index among the graph's outputs."""

    number: int


def exchanged(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with each leaf of its containers changed; dataclasses that pytree does not know count as containers, too."""

    def leaf(item: Any) -> Any:
        if not is_dataclass(item) or isinstance(item, (type, OutputPlace)):
            return change(item)
        # Fields are set past __init__ and past a frozen dataclass's __setattr__: the copy is not to check or compute anything.
        made = copy.copy(item)
        for field in fields(item):
            object.__setattr__(made, field.name, exchanged(getattr(item, field.name), change))
        return made

    return pytree.tree_map(leaf, value)


def parted(result: Any) -> tuple[Any, list[torch.Tensor]]:
    """``result`` with a :class:`OutputPlace` for each tensor, and the tensors. Raises :class:`StageError` for other leaves."""
    tensors: list[torch.Tensor] = []

    def place(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return OutputPlace(len(tensors) - 1)
        if not isinstance(leaf, PLAIN):
            raise StageError(
                f"forward gives a value of type {type(leaf).__name__}, which a stage cannot give; let it give tensors, plain "
                "values, and tuples, lists, dicts and dataclasses of them (as with use_cache=False)"
            )
        return leaf

    return exchanged(result, place), tensors
