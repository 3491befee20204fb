"""What a storage holds, told as runs of bytes of named sources, without holding any byte.

A run says: ``length`` bytes, from byte ``start`` of source number ``source`` in the form ``form`` (the dtype that its elements
have there), of the rank with index ``rank`` in its group (-1: this rank's own), squeezed at most through ``precision`` bits of
mantissa. A storage's content is a table of runs, one row each, sorted by ``offset``, that covers it without gaps. All units are
bytes, so that a storage may be seen as elements of any size. Copying between strided views is exact for any views, and costs
time by the number of runs, not of elements: a launch over 4,096 ranks is a table of some thousand rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

OFFSET, LENGTH, SOURCE, RANK, START, PRECISION, FORM = range(7)
COLUMNS = 7
UNDEFINED, ZERO = 0, 1
OWN_RANK = -1
EXACT = 1 << 10
"""Precision of a value that was not squeezed yet."""

Runs = torch.Tensor
"""int64 table of shape (runs, 7): offset, length, source, rank, start, precision, form."""

_DTYPES: list[torch.dtype] = []


def form_of(dtype: torch.dtype) -> int:
    """The number that stands for ``dtype`` in a table; 0 is no form, that of bytes that nothing or zero was written to."""
    if dtype not in _DTYPES:
        _DTYPES.append(dtype)
    return _DTYPES.index(dtype) + 1


def dtype_of(form: int) -> torch.dtype:
    """The dtype that the number ``form`` > 0 stands for."""
    return _DTYPES[form - 1]


def run(source: int, length: int, precision: int = EXACT, dtype: torch.dtype | None = None) -> Runs:
    """One run of ``length`` bytes: all of ``source``, whose elements are of ``dtype``."""
    form = form_of(dtype) if dtype is not None else 0
    return torch.tensor([[0, length, source, OWN_RANK, 0, precision, form]], dtype=torch.int64)[: 1 if length else 0]


def cast(runs: Runs, source: torch.dtype, target: torch.dtype, precision: int) -> Runs | None:
    """The same elements of dtype ``source`` as ``target``, which keeps ``precision`` bits; None if they are of another form."""
    named, width = runs[:, SOURCE] > ZERO, source.itemsize
    foreign = named & (runs[:, FORM] != form_of(source))
    if bool(foreign.any()) or bool((runs[:, [OFFSET, LENGTH, START]] % width != 0).any()):
        return None
    out = runs.clone()
    out[:, [OFFSET, LENGTH, START]] = runs[:, [OFFSET, LENGTH, START]] // width * target.itemsize
    out[:, PRECISION].clamp_(max=precision)
    out[:, FORM] = torch.where(named, form_of(target), 0)
    return out


def blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The view as (starts, length) in bytes: its elements in logical order are blocks of ``length`` from each of ``starts``."""
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    length = 1
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    starts = torch.tensor([tensor.storage_offset()], dtype=torch.int64)
    for size, stride in dims:
        starts = (starts[:, None] + torch.arange(size, dtype=torch.int64) * stride).reshape(-1)
    return starts * tensor.itemsize, length * tensor.itemsize


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, each once, sorted as they lie in memory: a transposed or expanded matrix reads like itself."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d]))
    return tensor.permute(order)


def read(content: Runs, view: torch.Tensor) -> Runs:
    """Runs of ``view`` in logical order; offsets count from 0."""
    starts, length = blocks(view)
    if view.numel() == 0:
        return content[:0]
    if len(starts) == 1 and length == size(content):
        return content
    first = torch.searchsorted(content[:, OFFSET].contiguous(), starts, right=True) - 1
    last = torch.searchsorted(content[:, OFFSET].contiguous(), starts + length, right=False) - 1
    counts = last - first + 1
    block = torch.repeat_interleave(torch.arange(len(starts)), counts)
    before = torch.cumsum(counts, 0) - counts
    rows = content[first[block] + torch.arange(len(block)) - before[block]]
    low = torch.maximum(rows[:, OFFSET], starts[block])
    high = torch.minimum(rows[:, OFFSET] + rows[:, LENGTH], starts[block] + length)
    skipped = torch.where(rows[:, SOURCE] > ZERO, low - rows[:, OFFSET], 0)
    out = rows.clone()
    out[:, START] += skipped
    out[:, LENGTH] = high - low
    return joined(relocated(out))


def write(content: Runs, view: torch.Tensor, runs: Runs) -> Runs:
    """Content after ``runs``, as many bytes as ``view`` has, were copied into ``view``."""
    if view.numel() == 0:
        return content
    starts, length = blocks(view)
    if len(starts) == 1 and length == size(content):
        return joined(runs)
    pieces = cut(runs, length)
    pieces[:, OFFSET] = starts[pieces[:, OFFSET] // length] + pieces[:, OFFSET] % length
    kept = _without(content, torch.sort(starts).values, length)
    return joined(_sorted(torch.cat([kept, pieces])))


def cut(runs: Runs, length: int) -> Runs:
    """The same runs, none of which crosses a multiple of ``length``."""
    first = runs[:, OFFSET] // length
    last = (runs[:, OFFSET] + runs[:, LENGTH] - 1) // length
    return _split(runs, last - first + 1, lambda index, nth: (first[index] + nth) * length)


def size(content: Runs) -> int:
    """Bytes that ``content`` tells of."""
    return int(content[-1, OFFSET] + content[-1, LENGTH]) if len(content) else 0


def relocated(runs: Runs) -> Runs:
    """The same runs, one behind the other from offset 0."""
    out = runs.clone()
    out[:, OFFSET] = torch.cumsum(runs[:, LENGTH], 0) - runs[:, LENGTH]
    return out


def joined(runs: Runs) -> Runs:
    """The same content in as few runs as possible."""
    if len(runs) < 2:
        return runs
    a, b = runs[:-1], runs[1:]
    follows = torch.where(a[:, SOURCE] > ZERO, a[:, START] + a[:, LENGTH], a[:, START]) == b[:, START]
    for column in (SOURCE, RANK, PRECISION, FORM):
        follows &= a[:, column] == b[:, column]
    follows &= a[:, OFFSET] + a[:, LENGTH] == b[:, OFFSET]
    heads = torch.cat([torch.tensor([True]), ~follows])
    out = runs[heads].clone()
    total = torch.zeros(len(out), dtype=torch.int64)
    out[:, LENGTH] = total.scatter_add_(0, torch.cumsum(heads, 0) - 1, runs[:, LENGTH])
    return out


def shifted(runs: Runs, offset: int) -> Runs:
    """The same runs, ``offset`` further on."""
    out = runs.clone()
    out[:, OFFSET] += offset
    return out


def ascends(runs: Runs, shard_numel: int, ranks: Sequence[int] = ()) -> bool:
    """Whether ``runs`` are elements of one gathered source, in its order over all ranks; parts may be left out.

    Each rank holds ``shard_numel`` elements. ``ranks`` are the sizes of the groups that it was gathered over, the outermost
    first: two of them may be nested either way.
    """
    if len(torch.unique(runs[:, [SOURCE, FORM]], dim=0)) != 1 or bool((runs[:, RANK] < 0).any()):
        return False
    rank, size = runs[:, RANK], shard_numel * dtype_of(int(runs[0, FORM])).itemsize
    orders = [rank] if len(ranks) != 2 else [rank, rank % ranks[1] * ranks[0] + rank // ranks[1]]
    begins = [order * size + runs[:, START] for order in orders]
    return any(bool((begin[:-1] + runs[:-1, LENGTH] <= begin[1:]).all()) for begin in begins)


def whole_elements(runs: Runs) -> bool:
    """Whether every run of a source begins and ends between elements of its form."""
    widths = torch.tensor([dtype_of(form).itemsize if form else 1 for form in runs[:, FORM].tolist()], dtype=torch.int64)
    return not bool((runs[:, [START, LENGTH]] % widths[:, None] != 0).any())


def _split(runs: Runs, counts: torch.Tensor, boundary: object) -> Runs:
    """Split row i into ``counts[i]`` rows; row part n > 0 begins at ``boundary(i, n)``."""
    index = torch.repeat_interleave(torch.arange(len(runs)), counts)
    nth = torch.arange(len(index)) - (torch.cumsum(counts, 0) - counts)[index]
    rows = runs[index]
    end = rows[:, OFFSET] + rows[:, LENGTH]
    low = torch.maximum(rows[:, OFFSET], boundary(index, nth))  # type: ignore[operator]
    high = torch.minimum(end, boundary(index, nth + 1))  # type: ignore[operator]
    out = rows.clone()
    out[:, START] += torch.where(rows[:, SOURCE] > ZERO, low - rows[:, OFFSET], 0)
    out[:, OFFSET], out[:, LENGTH] = low, high - low
    return out


def _without(content: Runs, starts: torch.Tensor, length: int) -> Runs:
    """Content with the blocks of ``length`` at ``starts`` (ascending) taken out, so that they can be put anew."""
    edges = torch.unique(torch.stack([starts, starts + length]))
    begin, end = content[:, OFFSET], content[:, OFFSET] + content[:, LENGTH]
    first = torch.searchsorted(edges, begin.contiguous(), right=True)
    inside = torch.searchsorted(edges, end.contiguous(), right=False) - first
    bounds = torch.cat([edges, edges[-1:] + (1 << 60)])
    pieces = _split(
        content,
        inside.clamp(min=0) + 1,
        lambda index, nth: torch.where(nth > 0, bounds[(first[index] + nth - 1).clamp(max=len(edges))], -1),
    )
    block = torch.searchsorted(starts, pieces[:, OFFSET].contiguous(), right=True) - 1
    covered = (block >= 0) & (pieces[:, OFFSET] < starts[block.clamp(min=0)] + length)
    return pieces[~covered & (pieces[:, LENGTH] > 0)]


def _sorted(runs: Runs) -> Runs:
    return runs[torch.sort(runs[:, OFFSET], stable=True).indices]
