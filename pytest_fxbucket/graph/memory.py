"""What every storage of a graph holds, and copies between views of storages."""

from __future__ import annotations

import torch

from pytest_fxbucket.compat.storage import storage_key
from pytest_fxbucket.graph import contents
from pytest_fxbucket.graph.contents import Runs

MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""How much of a number each floating dtype keeps; other dtypes lose nothing that is followed here."""


def precision_of(dtype: torch.dtype) -> int:
    """Bits of mantissa that a value of ``dtype`` has; EXACT for what is no float."""
    return MANTISSA_BITS.get(dtype, contents.EXACT)


def _kept(source: torch.dtype, target: torch.dtype) -> int:
    """Bits of mantissa that a cast keeps at most: no fraction survives as an integer."""
    return 0 if source.is_floating_point and not target.is_floating_point else precision_of(target)


class NotFollowedError(Exception):
    """An operator moves data in a way that runs of elements cannot tell; the message says how."""


class Memory:
    """Contents of every storage that was met so far."""

    def __init__(self) -> None:
        self._content: dict[int, Runs] = {}
        self._alive: dict[int, torch.Tensor] = {}

    def allocate(self, like: torch.Tensor, content: Runs | None = None) -> torch.Tensor:
        """A new contiguous meta tensor of ``like``'s shape and dtype, holding ``content`` (left out: undefined)."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device="meta")
        self.define(tensor, contents.run(contents.UNDEFINED, tensor.nbytes) if content is None else content)
        return tensor

    def define(self, tensor: torch.Tensor, content: Runs) -> None:
        """Say what the whole storage under ``tensor`` holds."""
        key = storage_key(tensor)
        self._content[key], self._alive[key] = content, tensor

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``'s storage was allocated here."""
        return storage_key(tensor) in self._content

    def read(self, tensor: torch.Tensor) -> Runs:
        """Runs of ``tensor`` in logical order."""
        return contents.read(self._content[storage_key(tensor)], tensor)

    def write(self, target: torch.Tensor, runs: Runs) -> None:
        """Copy ``runs``, the bytes of as many elements in logical order, into the view ``target``."""
        key = storage_key(target)
        self._content[key] = contents.write(self._content[key], target, runs)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``target.copy_(source)``."""
        self.write(target, self.cast(source.expand(target.shape), target.dtype))

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> Runs:
        """Runs of ``tensor``'s elements, in logical order, as ``dtype``; a cast to fewer bits is noted in them."""
        runs = self.read(tensor)
        if tensor.dtype == dtype:
            return runs
        cast = contents.cast(runs, tensor.dtype, dtype, _kept(tensor.dtype, dtype))
        if cast is None:
            raise NotFollowedError(f"it casts {tensor.dtype} that other elements are seen as to {dtype}")
        return cast
