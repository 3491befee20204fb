"""The batch that a step is traced with; one graph serves every rank and step, so others may differ in values alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.user_frame import blamed

if TYPE_CHECKING:
    from pytest_fxbucket.step.mesh import Mesh
    from pytest_fxbucket.step.roles import Value

_Leaf = tuple[object, ...]
"""Path, shape and dtype of a tensor of the batch; path and value of a constant."""


def first_batch(batch: Callable[[int, int], Any], name: str, mesh: Mesh, rank: int) -> Any:
    """What ``batch``, called ``name``, gives ``rank`` in step 0: a tuple, list or dict, with tensors at any depth.

    Raises :class:`CaptureError` for anything else, and if the last batch's shapes, dtypes or constants are others.
    """
    here, last = mesh.data_rank(rank), mesh.data_ranks - 1
    with blamed(lambda: f"[model] batch {name}"):
        data, other = batch_of(batch(here, 0)), batch_of(batch(last, 1))
    if not isinstance(data, (tuple, list, dict)):
        raise CaptureError(
            f"[model] batch {name} gave a value of type {type(data).__name__}, expected a tuple or a dict of inputs"
        )
    _refuse_other_batch(name, data, other, f"rank {here}, step 0", f"rank {last}, step 1")
    return data


def batch_of(given: Any) -> Any:
    """``given`` by a batch function, made of tuples, lists and dicts alone; a tensor by itself is a tuple of one.

    Raises :class:`CaptureError` for an object that holds tensors, which could be no inputs of the graph.
    """
    try:
        return (given,) if isinstance(given, torch.Tensor) else _plain(given)
    except RecursionError:
        raise CaptureError(
            "[model] batch gave a value that contains itself, or is nested too deep; give tuples, lists and dicts of tensors"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_plain, value))
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    if not isinstance(value, (torch.Tensor, type)):
        _refuse_holder(value)
    return value


def _refuse_holder(value: Any) -> None:
    """Tensors within an object would be constants of the graph, the same on every rank."""
    kind = type(value).__name__
    if hasattr(value, "__array__"):
        raise CaptureError(f"[model] batch gave a {kind}, where a tensor is expected; make one with torch.as_tensor")
    if dataclasses.is_dataclass(value) or any(
        isinstance(item, torch.Tensor) for item in getattr(value, "__dict__", {}).values()
    ):
        raise CaptureError(
            f"[model] batch gave a {kind}, whose tensors could be no inputs of the graph; "
            "give tuples, lists and dicts, such as vars() of it"
        )


def _refuse_other_batch(name: str, first: Any, other: Any, here: str, there: str) -> None:
    """One graph serves every rank and step, so only the values of tensors may change from batch to batch."""
    _refuse_change(name, _described(first), _described(other), f"for {here}", there)


class Followed:
    """The batches of one rank, step by step, each held against what was traced; ``traced`` are the graph's inputs."""

    def __init__(self, name: str, rank: int, traced: Iterable[Value]) -> None:
        self._name, self._rank = name, rank
        self._tensors: list[_Leaf] = [(value.fqn, value.shape, value.dtype) for value in traced if value.role == "batch"]
        self._first: list[_Leaf] | None = None

    def tensors(self, given: Any, step: int) -> list[torch.Tensor]:
        """The tensors that ``given``, a batch, holds, in the order of the inputs. Raises :class:`CaptureError` for others."""
        data = batch_of(given)
        found, there = _described(data), f"rank {self._rank}, step {step}"
        tensors = [leaf for leaf in found if len(leaf) == 3]
        _refuse_change(self._name, self._tensors, tensors, "where the step was traced", there)
        self._first = found if self._first is None else self._first
        _refuse_change(self._name, self._first, found, f"for rank {self._rank} before", there)
        return [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, torch.Tensor)]


def _refuse_change(name: str, first: Sequence[_Leaf], other: Sequence[_Leaf], here: str, there: str) -> None:
    if first != other:
        changed = next((x, y) for x, y in zip_longest(first, other) if x != y)
        was, became = (" ".join(map(str, leaf)) if leaf else "nothing" for leaf in changed)
        raise CaptureError(
            f"[model] batch {name} gave {was} {here}, but {became} for {there}; "
            "only the values of its tensors may change, since one graph serves all"
        )


def _described(batch: Any) -> list[_Leaf]:
    """Path of each leaf of ``batch``, with shape and dtype of a tensor, or the value of a plain constant."""
    found: list[_Leaf] = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append((pytree.keystr(path), tuple(leaf.shape), leaf.dtype))
        else:
            found.append((pytree.keystr(path), repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf)))
    return found
