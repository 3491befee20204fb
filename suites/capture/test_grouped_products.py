"""Experts of one grouped product are traced in every dtype that a CPU multiplies, not in CUDA's bfloat16 alone."""

from __future__ import annotations

import pytest
import torch

from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.tracing import trace


def multiplied(tokens: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
    made = torch._grouped_mm(tokens, experts, offs=ends)
    return [made, *torch.autograd.grad(made.float().square().sum(), [tokens, experts])]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA multiplies grouped bfloat16 alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_float32_experts_run_is_captured_and_its_gradients_are_eagers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, 16, generator=generator).to(dtype).requires_grad_()
    experts = torch.randn(3, 16, 16, generator=generator).to(dtype).requires_grad_()
    given = [tokens, experts, torch.tensor([2, 5, 8], dtype=torch.int32)]
    mode = FakeTensorMode()
    with mode:
        graph = trace(multiplied, [mode.from_tensor(one) for one in given])
    for traced, eager in zip(graph(*given), multiplied(*given), strict=True):
        assert torch.equal(traced, eager)
