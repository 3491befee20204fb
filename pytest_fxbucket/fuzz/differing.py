"""What two runs of a program left, compared bit for bit, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pytest_fxbucket.checks.bitwise.localise import bits


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
    """Strides that tell where an element lies: of one element or none they do not matter."""
    return (
        tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1) if tensor.numel() else ()
    )
