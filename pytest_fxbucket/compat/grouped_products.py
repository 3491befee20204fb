"""``_grouped_mm`` (``torch._meta_registrations``) traced for CPUs, which multiply any floating dtype; in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
