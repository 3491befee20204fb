"""What each kind of collective makes of the tensors that members sent: `sent[m]` are member m's; results are flat copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pytest_fxbucket.ranks import sums
from pytest_fxbucket.ranks.arithmetic import Operation
from pytest_fxbucket.ranks.one_process.exchange import CollectiveMismatch

_Tensors = list[torch.Tensor]


def reduction(
    operation: Operation, ranks: Sequence[int], owner: Callable[[int], int | None]
) -> Callable[[list[_Tensors]], _Tensors]:
    """A function that combines the i-th tensors of all members, the `ranks`, for all i.

    The member `owner`(i) gets the result; None: all do.
    """
    add = sums.current()

    def reduce(sent: list[_Tensors]) -> _Tensors:
        return [
            add([_copy(part) for part in parts], operation, ranks, owner(index))
            for index, parts in enumerate(zip(*sent, strict=True))
        ]

    return reduce


def by_input(sent: list[_Tensors]) -> _Tensors:
    """Copies of the first tensors of all members, then of the second, and so on."""
    return [_copy(part) for parts in zip(*sent, strict=True) for part in parts]


def in_a_row(into: _Tensors, parts: Sequence[torch.Tensor]) -> None:
    """Copy the parts that `by_input` gives into tensors that each take those of all members, one after the other."""
    for index, tensor in enumerate(into):
        members = len(parts) // len(into)
        mine = parts[index * members : (index + 1) * members]
        if tensor.is_contiguous():
            torch.cat(list(mine), out=tensor.detach().view(-1))
        else:
            fill([tensor], [torch.cat(list(mine))])


def copies_of_all(sent: list[_Tensors]) -> list[_Tensors]:
    """Copies of what each member sent."""
    return [[_copy(tensor) for tensor in tensors] for tensors in sent]


def copies_of(root: int) -> Callable[[list[_Tensors]], _Tensors]:
    """A function that copies what member `root` sent."""
    return lambda sent: [_copy(tensor) for tensor in sent[root]]


def slices(tensor: torch.Tensor, sizes: Sequence[int], world: int) -> _Tensors:
    """`world` slices of the first dimension, of `sizes` rows or of equal ones. Raises ValueError."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes and rows % world:
        raise ValueError(f"all_to_all of {rows} rows, which {world} ranks cannot share evenly")
    if sizes and sum(sizes) != rows:
        raise ValueError(f"all_to_all with slices of {', '.join(map(str, sizes))} rows of a tensor that has {rows}")
    return list(torch.split(tensor.detach(), list(sizes) or [rows // world] * world))


def fill(into: _Tensors, parts: Sequence[torch.Tensor]) -> None:
    """Copy each part into its tensor, of any shape; no tensors: nothing. Raises CollectiveMismatch when one does not fit."""
    for tensor, part in zip(into, parts, strict=True) if into else ():
        if tensor.numel() != part.numel() or tensor.dtype != part.dtype:
            have, want = f"{tensor.numel():,} {_dtype(tensor)}", f"{part.numel():,} {_dtype(part)}"
            raise CollectiveMismatch(f"{want} arrived where {have} were expected")
        # Detached, or autograd would take the collective for an operation of its own.
        tensor.detach().copy_(part.view(tensor.shape))


def spoil(outputs: _Tensors, inputs: _Tensors) -> None:
    """Overwrite outputs that a collective has not filled yet with all-ones bits (NaN, -1), so that reading them early shows.

    Other back ends leave there what was there, sometimes even the right values. Outputs that overlap inputs stay.
    """
    used = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for tensor in outputs:
        if tensor.untyped_storage().data_ptr() in used or not tensor.is_contiguous() or tensor.dtype == torch.bool:
            continue
        if tensor.numel():
            tensor.detach().view(-1).view(torch.uint8).fill_(0xFF)


def require_whole(output: torch.Tensor, source: torch.Tensor, world: int) -> None:
    """ValueError if `output` cannot take `source` of `world` members."""
    if output.numel() != source.numel() * world or output.dtype != source.dtype:
        have, want = f"{output.numel():,} {_dtype(output)}", f"{source.numel() * world:,} {_dtype(source)}"
        raise ValueError(f"all_gather into an output of {have}, where {want} are due")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).clone()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
