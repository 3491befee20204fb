"""What eager torch cannot run either is said so, and not put down to tracing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.user_frame import naming_user_frame


def test_a_histogram_of_integers_is_told_from_what_tracing_cannot_do() -> None:
    """As a router of experts makes it, which GPUs run and CPUs do not."""
    counts = torch.arange(4)
    with pytest.raises(NotImplementedError):
        torch.histc(counts, bins=2)
    said = (
        r'^tracing module router failed at .*: torch has no "histogram_cpu" for int64, eagerly neither; cast .* x\.float\(\)$'
    )
    mode = FakeTensorMode()
    with pytest.raises(CaptureError, match=said), naming_user_frame(lambda: "tracing module router"), mode:
        torch.histc(mode.from_tensor(counts), bins=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.nn.functional.conv1d(x, y, torch.ones(2)),
        lambda x, y: torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=y),
    ],
)
def test_two_dtypes_in_one_product_are_told_from_what_tracing_cannot_do(call: Callable[..., torch.Tensor]) -> None:
    """As where a table of float32 meets weights in bfloat16: attention of timm's Swin and BEiT."""
    given = [torch.ones(1, 2, 2), torch.ones(2, 2, dtype=torch.bfloat16)]
    with pytest.raises(RuntimeError):
        call(*given)
    mode = FakeTensorMode()
    said = r"^tracing module attention failed at .*, which torch refuses eagerly, too; cast one to the other's, .*$"
    with pytest.raises(CaptureError, match=said), naming_user_frame(lambda: "tracing module attention"), mode:
        call(*map(mode.from_tensor, given))
