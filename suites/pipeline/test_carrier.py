"""One tensor for all that crosses: values, strides, what requires grad, and gradients come out as they went in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_fxbucket.pipeline.stages import Crossing
from pytest_fxbucket.pipeline.targets.carrier import Carrier
from suites.pipeline.running import bits


def crossing(value: Tensor) -> Crossing:
    size = value.numel() * value.element_size()
    return Crossing("x", "", 0, tuple(value.shape), tuple(value.stride()), value.dtype, size)


VALUES: dict[str, Tensor] = {
    "contiguous": torch.randn(3, 5),
    "transposed": torch.randn(3, 5).t(),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "gaps": torch.randn(4, 6)[:, ::2],
    "bfloat16": torch.randn(3, 3).to(torch.bfloat16),
    "float64": torch.randn(7, dtype=torch.float64),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "bools": torch.rand(5) > 0.5,
    "integers": torch.randint(-9, 9, (2, 3)),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", VALUES)
def test_values_and_strides_come_out_as_they_went_in(name: str, dtype: torch.dtype) -> None:
    values = (VALUES["integers"], VALUES[name], VALUES["contiguous"])
    carrier = Carrier([crossing(value) for value in values], dtype)
    packed = carrier.pack(values)
    assert (packed.dtype, packed.shape, packed._base, packed.requires_grad) == (dtype, carrier.shape, None, False)
    out = carrier.unpack(packed.clone())
    assert bits(out) == bits(tuple(value.resolve_conj() for value in values))
    assert [one.stride() for one in out] == [value.stride() for value in values]
    assert not any(one.requires_grad for one in out)


def test_a_chunk_of_megatron_gets_three_dimensions() -> None:
    carrier = Carrier([crossing(VALUES["contiguous"])], dims=3)
    assert carrier.pack([VALUES["contiguous"]]).shape == carrier.shape == ((3 * 5 * 4 + 4 + 8 * 3) // 4, 1, 1)


def through(values: tuple[Tensor, ...], use: Any, *, packed: bool) -> list[Any]:
    """Bits and strides of the gradients of ``values``, used as they are or behind a carrier in another process' stead."""
    carrier = Carrier([crossing(value) for value in values])
    if not packed:
        use(*values).backward()
        return [bits(value.grad) for value in values]
    sent = carrier.pack(values)
    received = sent.detach().clone().requires_grad_()
    out = carrier.unpack(received)
    assert [one.requires_grad for one in out] == [value.requires_grad for value in values]
    use(*out).backward()
    assert received.grad is not None
    sent.backward(received.grad.clone())
    return [bits(value.grad) for value in values]


def leaves() -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    return (
        torch.randn(3, 4, requires_grad=True),
        torch.randn(4, 3, requires_grad=True),
        torch.randn(3, 3),
        torch.tensor([2, 0, 1]),
        torch.randn(3, 3, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(5, requires_grad=True),
    )


def test_gradients_come_back_and_those_of_what_is_not_read_stay_none() -> None:
    def use(a: Tensor, b: Tensor, mask: Tensor, order: Tensor, c: Tensor, unread: Tensor) -> Tensor:
        return ((a @ b)[order] * mask + c.float()).sum() + a.t().sum(1)[0]

    plain, carried = through(leaves(), use, packed=False), through(leaves(), use, packed=True)
    assert carried == plain
    assert [grad is None for grad in plain] == [False, False, True, True, False, True]


def test_a_gradient_has_the_strides_that_it_had() -> None:
    strides: list[Any] = []

    def use(value: Tensor) -> Tensor:
        return (value.t() * torch.ones(4, 3)).sum()

    value = torch.randn(3, 4, requires_grad=True)
    twin = value.detach().clone().requires_grad_()
    carrier = Carrier([crossing(value)])
    for leaf, packed in ((value, False), (twin, True)):
        middle = leaf * 1.0
        middle.register_hook(lambda grad: strides.append(grad.stride()))
        use(*carrier.unpack(carrier.pack([middle])) if packed else (middle,)).backward()
    assert strides[0] == strides[1] != (4, 1)
