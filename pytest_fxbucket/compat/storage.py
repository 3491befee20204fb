"""Identity of storages (``UntypedStorage._cdata``, in torch 2.11 to 2.15); meta tensors have no data pointer to compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two living tensors exactly if they share a storage."""
    return int(tensor.untyped_storage()._cdata)
