"""Inputs for programs, small integers that differ by rank; and the results of two runs compared bit for bit, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_fxbucket.checks.bitwise.localise import bits


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input as the graph's fake value has it; ``storage`` is one number for all inputs that share a storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int


def has_symbolic(graph_module: fx.GraphModule) -> bool:
    """Whether an input has a symbolic size."""
    values = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    return any(not isinstance(size, int) for value in values for size in value.shape)


def graph_inputs(graph_module: fx.GraphModule, times: int = 1) -> Iterator[GraphInput]:
    """What inputs to make for ``graph_module``; symbolic sizes are ``times`` those that it was traced with.

    Strides and offsets are as traced, so no input can be made whose strides are symbolic, as of a size behind the first.
    """
    storages: dict[object, int] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        shape = tuple(size if isinstance(size, int) else times * int(size.node.hint) for size in value.shape)
        yield GraphInput(shape, value.stride(), value.storage_offset(), value.dtype, storage)


def inputs_of(inputs: Sequence[GraphInput], seed: int, rank: int) -> list[Tensor]:
    """Integers from -4 to 4 as each dtype has them, drawn by seed and rank; inputs of one storage and dtype share it."""
    # Each storage is as large as its last element that an input reaches. It is drawn once and, for each dtype, made a tensor
    # that inputs are views of, with their own strides and offsets: aliases in the traced step stay aliases.
    sizes: dict[int, int] = {}
    for given in inputs:
        reach = sum((size - 1) * stride for size, stride in zip(given.shape, given.strides, strict=True))
        # The reach can be negative where a size is 0.
        sizes[given.storage] = max(sizes.get(given.storage, 0), given.offset + max(0, reach) + 1)
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    numbers = {storage: torch.randint(-4, 5, (size,), generator=generator) for storage, size in sorted(sizes.items())}
    storages: dict[tuple[int, torch.dtype], Tensor] = {}
    made = []
    for given in inputs:
        key = (given.storage, given.dtype)
        storages.setdefault(key, numbers[given.storage].to(given.dtype))
        made.append(storages[key].as_strided(given.shape, given.strides, given.offset))
    return made


def differences(first: tuple[list[Any], list[Any]], second: tuple[list[Any], list[Any]]) -> Iterator[str]:
    """A sentence for each output, or input as it was left, that is not the same bit for bit."""
    if len(first[0]) != len(second[0]):
        yield f"{len(first[0])} outputs before the pass, {len(second[0])} after it"
        return
    for what, before, after in zip(("output", "input"), first, second, strict=True):
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            text = _difference(a, b)
            if text:
                yield f"{what} {number} {text}"


def _difference(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if type(a) is type(b) and a == b else f"is {a!r} before the pass, {b!r} after it"
    forms: list[tuple[str, Any, Any]] = [
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", a.dtype, b.dtype),
        ("strides", _strides(a), _strides(b)),
    ]
    for what, x, y in forms:
        if x != y:
            return f"has {what} {x} before the pass, {y} after it"
    unequal = (bits(a) != bits(b)).nonzero().reshape(-1).tolist()
    if not unequal:
        return ""
    first = unequal[0]
    x, y = (flat[first].item() for flat in (a.reshape(-1), b.reshape(-1)))
    return f"differs in {len(unequal)} of {a.numel()} elements, first at {first}: {x} before the pass, {y} after it"


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides that tell where an element lies: not those of dimensions of size 1, and none of a tensor without elements."""
    return (
        tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1) if tensor.numel() else ()
    )
