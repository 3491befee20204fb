"""What operators gave in one layer, given again for the same calls in another: new fake tensors without the fake operator.

An operator that gets what it got in another layer gives tensors of the same shapes; to ask for them again is most of what
calling a layer on fake tensors costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pytest_fxbucket.compat.dispatch import unseen
from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.compat.storage import storage_key


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor that an operator gave: one that it got, a view of one that it got, or a new one."""

    value: FakeTensor
    got: int | None
    """Which of the tensors that the operator got has the storage."""
    same: bool
    """Whether it is that very tensor."""


class Results:
    """What one call of an operator gave. Holds on to the tensors."""

    def __init__(self, got: list[torch.Tensor], result: Any) -> None:
        self._one = isinstance(result, torch.Tensor)
        self._type = type(result)
        leaves: list[Any] = [result] if self._one else list(result) if type(result) in (list, tuple) else [None]
        self.known = all(type(leaf) is FakeTensor for leaf in leaves) and all(type(tensor) is FakeTensor for tensor in got)
        """Whether :meth:`again` can be asked: all that was given are tensors."""
        if self.known:
            storages = {storage_key(tensor): i for i, tensor in reversed([*enumerate(got)])}
            same = {id(tensor): i for i, tensor in reversed([*enumerate(got)])}
            self._likes = [_Like(t, same.get(id(t), storages.get(storage_key(t))), id(t) in same) for t in leaves]

    def again(self, got: list[torch.Tensor]) -> Any:
        """The same for a call that got ``got``, tensors like those of the first call in all but their identity."""
        made = [self._made(like, got) for like in self._likes]
        return made[0] if self._one else self._type(made)

    def _made(self, like: _Like, got: list[torch.Tensor]) -> torch.Tensor:
        if like.same and like.got is not None:
            return got[like.got]
        value = like.value
        with unseen():
            if like.got is None:
                meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            else:
                storage = got[like.got].untyped_storage()
                meta = torch.empty(0, dtype=value.dtype, device="meta")
                meta.set_(storage, value.storage_offset(), value.shape, value.stride())
            return FakeTensor(value.fake_mode, meta, value.fake_device)


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """All tensors that an operator gets, in order."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += [leaf for leaf in value if isinstance(leaf, torch.Tensor)]
    return found
