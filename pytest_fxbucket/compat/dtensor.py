"""What DTensor remembers of meshes (``torch._C`` and ``torch.distributed.tensor._redistribute``, in torch 2.11 to 2.15)."""

from __future__ import annotations

import sys


def forget_meshes() -> None:
    """Make DTensor forget the meshes that it saw.

    It knows them by ranks and names alone: of a job before, it would take the process groups too, which are gone.
    """
    if "torch.distributed.tensor._redistribute" not in sys.modules:
        return
    import torch
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
