"""Tensors of one call that share memory: a graph reads each of them once, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.capture.roles import Value

Pair = tuple[str, str]
_CALLED = {"param": "parameter ", "buffer": "buffer ", "grad": "gradient of ", "batch": "argument "}


def called(role: str, fqn: str) -> str:
    """What to call a tensor in a sentence."""
    return f"{_CALLED.get(role, f'{role} ')}{fqn}"


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[Pair]:
    """Pairs of different tensors with memory in common, from the first byte of each to its last, by name."""
    spans = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items())
    open_ones: list[tuple[int, str, torch.Tensor]] = []
    for start, name in spans:
        tensor = tensors[name]
        end = start + _extent_bytes(tensor)
        if not start or start == end:
            continue
        open_ones = [one for one in open_ones if one[0] > start]
        yield from ((other, name) for _, other, one in open_ones if one is not tensor and one.device == tensor.device)
        open_ones.append((end, name, tensor))


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    elements = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return elements * tensor.element_size()


def refuse_shared_writes(pairs: Iterable[Pair], written: Iterable[Value]) -> None:
    """Raise :class:`CaptureError` if one of ``pairs``, whose names :func:`called` gave, has a tensor that is ``written``."""
    names = {called(value.role, value.fqn) for value in written}
    for one, other in pairs:
        if one in names or other in names:
            # In memory either may lie first.
            one, other = sorted((one, other), key=lambda name: (not _is_argument(name), name))
            both = f"arguments {one[9:]} and {other[9:]}" if _is_argument(one) and _is_argument(other) else f"{one} and {other}"
            raise CaptureError(f"{both} share memory, and the step writes there; pass it once, or a clone")


def _is_argument(name: str) -> bool:
    return name.startswith("argument ")
