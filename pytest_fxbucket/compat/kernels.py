"""Which kernels there are and how torch calls them: foreach, grouped products, devices; in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def grouped(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """``tensors`` by device and dtype, in torch's own order, which is none that one can see."""
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    groups = _group_tensors_by_device_and_dtype([list(tensors)]).values()
    return [[tensor for tensor in lists[0] if tensor is not None] for lists, _ in groups]


@contextmanager
def takes_fake_tensors() -> Iterator[None]:
    """While inside, what asks whether foreach calls can take its tensors decides for fake ones as for real ones."""
    from torch._subclasses import FakeTensor
    from torch.utils._foreach_utils import _foreach_supported_types

    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)


# Whether an operator can run on a device (``torch._C`` of torch 2.11 to 2.15; a CPU build knows it for CUDA in part only).


def has_kernel(operator: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether ``operator`` has a kernel for ``cpu``, ``cuda`` or ``meta``, be it one for all devices."""
    import torch

    key = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}[device_type]
    name = operator._schema.name + (f".{operator._schema.overload_name}" if operator._schema.overload_name else "")
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key))


# ``_grouped_mm`` (``torch._meta_registrations``) traced for CPUs, which multiply any floating dtype; in torch 2.11 to 2.15.


@contextmanager
def of_any_dtype() -> Iterator[None]:
    """In the block products of float32 experts and the like can be traced: fake kernels know CUDA's bfloat16 alone."""
    import torch
    from torch import _meta_registrations

    meta: Any = _meta_registrations

    common = getattr(meta, "_meta_grouped_mm_common", None)
    output = getattr(meta, "_create_grouped_mm_output_tensor", None)
    if common is None or output is None:
        yield
        return

    def product(a: torch.Tensor, b: torch.Tensor, *rest: Any, **options: Any) -> Any:
        alike = a.is_floating_point() and a.dtype == b.dtype != torch.bfloat16 and options.get("scale_a") is None
        if alike and not torch.cuda.is_available():
            return output(a, b, options.get("offs"), options.get("out_dtype"))
        return common(a, b, *rest, **options)

    meta._meta_grouped_mm_common = product
    try:
        yield
    finally:
        meta._meta_grouped_mm_common = common
