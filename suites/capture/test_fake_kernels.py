"""Fake tensors beside the CPU's kernels: where results lie, operator by operator, and what is traced or refused of dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_fxbucket.compat.fake_tensors import OTHERWISE, FakeTensorMode, KernelFakeMode
from pytest_fxbucket.compat.tracing import trace
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.user_frame import naming_user_frame

PLAIN, TURNED = torch.rand(2, 12, 4), torch.rand(2, 4, 12).transpose(1, 2)
LAYOUTS = {"first": (TURNED, PLAIN), "rest": (PLAIN, TURNED), "all": (TURNED, TURNED)}
"""The first tensor that an operator takes, and the others."""
LEFT = frozenset(
    {"_standard_gamma", "normal", "poisson"}  # would draw to be asked
    | {"_weight_norm_interface", "isin", "resize_as"}  # of another shape than their operands broadcast to
    | {"zero", "_unique"}  # before torch 2.13, and in no graph: zero_ stays as it is, _unique has sizes by values
)
NOT_CALLED = frozenset({"rand", "cudnn", "mkldnn", "_nested", "sparse"})
"""Parts of names of what is not called here: it draws, or is not for dense tensors of a CPU."""


def pointwise(name: str) -> Iterator[Any]:
    """Overloads of aten's ``name`` that give new tensors and are not made of other operators."""
    packet = getattr(torch.ops.aten, name)
    for operator in (getattr(packet, overload) for overload in packet.overloads()):
        schema = operator._schema
        if not torch._C._dispatch_has_kernel(operator.name()):
            continue
        writes = any(argument.alias_info for argument in (*schema.arguments, *schema.returns))
        if not writes and not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
            yield operator


def arguments(operator: Any, layout: tuple[Tensor, Tensor]) -> tuple[list[Any], dict[str, Any]] | None:
    """Values for what ``operator`` must be given; None if that is not of tensors and numbers."""
    values = {"number": 1.5, "float": 1.5, "Scalar": 1.5, "int": 1, "bool": True}
    args: list[Any] = []
    keywords: dict[str, Any] = {}
    tensors = 0
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            value: Any = layout[min(tensors, 1)]
            tensors += 1
        elif argument.has_default_value():
            continue
        elif kind == "ScalarType":
            value = torch.float32
        elif kind not in values:
            return None
        else:
            value = values[kind]
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            args.append(value)
    return (args, keywords) if tensors else None


def strides(given: Any) -> list[list[int]]:
    """Of each dense tensor among ``given``, where a dimension has more than one element."""
    tensors = [one for one in (given if isinstance(given, (tuple, list)) else [given]) if isinstance(one, Tensor)]
    dense = [one for one in tensors if one.layout == torch.strided]
    return [[stride for stride, size in zip(one.stride(), one.shape, strict=True) if size > 1] for one in dense]


def found(names: Iterator[str], mode: type[FakeTensorMode]) -> tuple[set[str], set[str]]:
    """Which of aten's ``names`` could be called, and which of them lay a result otherwise in ``mode`` than their kernel."""
    called, otherwise, fakes = set(), set(), mode()
    for name in names:
        for operator in pointwise(name):
            for layout in LAYOUTS.values():
                given = arguments(operator, layout)
                if given is None:
                    continue
                args, keywords = given
                with fakes:
                    fake_args = [fakes.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
                    fake_keywords = {k: fakes.from_tensor(a) if isinstance(a, Tensor) else a for k, a in keywords.items()}
                try:
                    real = operator(*args, **keywords)
                    with fakes:
                        fake = operator(*fake_args, **fake_keywords)
                except Exception:  # not for operands like these: whatever an operator of torch raises
                    continue
                called.add(name)
                if strides(real) != strides(fake):
                    otherwise.add(name)
    return called, otherwise


def every() -> Iterator[str]:
    """All of aten that can be called with dense tensors, and does not draw."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        _, _, packet = name.partition("aten::")
        if packet and "." not in packet and not packet.endswith("_") and not any(part in packet for part in NOT_CALLED):
            yield packet


def test_operators_that_fakes_lay_otherwise_are_known_and_then_laid_as_kernels_lay_them() -> None:
    known = {name.removeprefix("aten::") for name in OTHERWISE}
    called, otherwise = found(every(), FakeTensorMode)
    assert len(called) > 200
    assert otherwise - LEFT <= known
    assert found(iter(sorted(known)), KernelFakeMode) == (known, set())
    assert otherwise & known  # else all of it could go


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_an_operand_that_is_spread_is_asked_as_such(layout: str) -> None:
    first, second = LAYOUTS[layout]
    spread = torch.ones(()).expand(first.shape)
    for grad, value in ((spread, second), (first, spread)):
        with KernelFakeMode() as mode:
            fake = torch.ops.aten.softplus_backward(mode.from_tensor(grad), mode.from_tensor(value), 1, 20)
        real = torch.ops.aten.softplus_backward(grad, value, 1, 20)
        assert strides(fake) == strides(real)
        assert math.prod(fake.shape) == real.numel()


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
        pytest.param(
            lambda x, y: torch.nn.functional.conv1d(x, y.unsqueeze(-1), torch.ones(2)),
            marks=pytest.mark.skipif(
                tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
                reason="fakes of torch 2.11 and 2.12 do not look at the dtypes of a convolution",
            ),
        ),
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
