"""Backward at full depth, where Python code has a say in it: a function with its own backward, a hook on a tensor.

What torch's own operators do in backward follows from what forward called. Code of others may do what it likes; it is run on
fake tensors, and the operators that it calls must repeat from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pytest_fxbucket.capture.pictures import Pictures
from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.compat.dispatch import TorchDispatchMode

Operators = list[tuple[object, object]]
"""Operators in their order, with arguments; of a tensor shape, strides and dtype."""


def backward_of(loss: object, parameters: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> Operators:
    """What backward from ``loss`` calls; nothing if neither a function in Python nor a hook on one of ``tensors`` is in it."""
    if not isinstance(loss, torch.Tensor) or not (any(t._backward_hooks for t in tensors) or _has_python(loss)):
        return []
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    with _Seen() as seen:
        torch.autograd.grad(loss, trainable, allow_unused=True)
    found: Operators = seen.operators
    return found


def refuse_irregular_backward(full: Operators, short: Operators, more: int) -> None:
    """Raise :class:`NotAlike` if ``full`` is not ``short`` with ``more`` repeats of one stretch behind that stretch."""
    length, rest = divmod(len(full) - len(short), more)
    same = next((i for i, (a, b) in enumerate(zip(full, short, strict=False)) if a != b), len(short))
    end = same + more * length
    if rest or length > same or full[same:end] != full[same - length : end - length] or full[end:] != short[same:]:
        raise NotAlike("backward, in which a function or a hook in Python has a say, does not repeat from layer to layer")


def _has_python(loss: torch.Tensor) -> bool:
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in _nodes(loss.grad_fn))


def _nodes(root: Any) -> Iterator[Any]:
    met, waiting = {root}, [root] if root is not None else []
    while waiting:
        node = waiting.pop()
        yield node
        sources = {source for source, _ in node.next_functions if source is not None} - met
        met |= sources
        waiting += sources


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Operators = []
        self._pictures = Pictures()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":
            self.operators.append((func, self._described((args, *(kwargs or {}).items()))))
        return func(*args, **(kwargs or {}))

    def _described(self, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return (tuple(value.shape), value.stride(), value.dtype)
        if type(value) in (tuple, list):
            return (type(value), *(self._described(item) for item in value))
        return self._pictures.of(value)
