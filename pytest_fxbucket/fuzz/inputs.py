"""What programs run on: small integers, other ones on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class Given:
    """One input as the graph's fake value has it. Inputs of one ``storage`` share it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int


def has_symbolic(graph_module: fx.GraphModule) -> bool:
    """Whether an input has a symbolic size."""
    values = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    return any(not isinstance(size, int) for value in values for size in value.shape)


def given(graph_module: fx.GraphModule, times: int = 1) -> Iterator[Given]:
    """What inputs to make for ``graph_module``; symbolic sizes are ``times`` those that it was traced with."""
    storages: dict[object, int] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        shape = tuple(size if isinstance(size, int) else times * int(size.node.hint) for size in value.shape)
        yield Given(shape, value.stride(), value.storage_offset(), value.dtype, storage)


def inputs_of(inputs: Sequence[Given], seed: int, rank: int) -> list[Tensor]:
    """Integers from -4 to 4, other ones on each rank; the same each time."""
    sizes: dict[int, int] = {}
    for given in inputs:
        reach = sum((size - 1) * stride for size, stride in zip(given.shape, given.strides, strict=True))
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
