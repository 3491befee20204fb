"""The formula of attention for GPUs, on the CPU, beside torch's kernel there."""

from __future__ import annotations

import pytest
import torch

from pytest_fxbucket.checks.attention_on_gpus import OPERATORS, attend, attend_backward

BLIND = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]], dtype=torch.bool)
"""Keys that a query may not see, for four queries: the second sees nothing."""


def tensors(dtype: torch.dtype, keys: int = 3, heads: int = 6) -> list[torch.Tensor]:
    """Four queries, keys, values and a gradient, as a model has them: sequence before heads in memory."""
    drawn = torch.Generator().manual_seed(0)
    sizes = ((4, 6), (keys, heads), (keys, heads), (4, 6))
    return [torch.randn(2, *size, 8, generator=drawn, dtype=torch.float64).to(dtype).transpose(1, 2) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["plain", "causal", "scaled", "masked", "blind", "fewer heads"])
def test_it_is_what_torchs_kernel_for_the_cpu_computes(how: str, dtype: torch.dtype) -> None:
    query, key, value, gradient = tensors(dtype, heads=2 if how == "fewer heads" else 6)
    options = {
        "scaled": {"scale": 0.3},
        "masked": {"attn_mask": torch.linspace(-2, 2, 12, dtype=dtype).view(1, 1, 4, 3)},
        "blind": {"attn_mask": torch.zeros(1, 1, 4, 3, dtype=dtype).masked_fill(BLIND, -torch.inf)},
    }.get(how, {})
    forward, backward = OPERATORS
    expected = forward(query, key, value, 0.0, how == "causal", **options)
    found = attend(query, key, value, 0.0, how == "causal", **options)
    rest = (gradient, query, key, value, *expected, 0.0, how == "causal")
    expected += backward(*rest, **options)
    found += attend_backward(*rest, **options)
    close = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(expected, found, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_blocks_of_keys_add_up_with_the_logsumexp_of_all() -> None:
    query, key, value, gradient = tensors(torch.float64, keys=6)
    out, logsumexp = attend(query, key, value)
    whole = attend_backward(gradient, query, key, value, out, logsumexp, 0.0, False)
    halves = [
        attend_backward(gradient, query, k, v, out, logsumexp, 0.0, False)
        for k, v in zip(key.split(3, 2), value.split(3, 2), strict=True)
    ]
    torch.testing.assert_close(whole[0], halves[0][0] + halves[1][0], rtol=1e-12, atol=1e-12)
    for index in (1, 2):
        torch.testing.assert_close(whole[index], torch.cat([half[index] for half in halves], 2), rtol=1e-12, atol=1e-12)
