"""Fake tensors, dispatch modes and kernels (``torch._subclasses``, ``torch.utils``); in torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher as python_kernels
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._foreach_utils import _foreach_supported_types, _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fxbucket.compat import pytree

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "fresh_like", "python_kernels", "unseen", "value_of"]

unseen = torch._C._DisableTorchDispatch
"""While entered, no mode sees what is called."""


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with function modes off: of its calls of torch's functions, modes see only the operators."""

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args)

    return run


def value_of(tensor: torch.Tensor) -> float | int | bool:
    """The value of a real tensor of one element, under fake mode too."""
    with unseen():
        return tensor.item()


# Fake tensors, shapes and dtypes without memory: ``torch._subclasses``, in torch 2.11 to 2.15.


def fresh_like(fake: FakeTensor) -> FakeTensor:
    """A fake tensor of the same sizes, strides, dtype, device and mode, on a storage of its own; nothing is dispatched."""
    with unseen():
        meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return FakeTensor(fake.fake_mode, meta, fake.device)


def symbolic_rows(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A fake tensor like ``tensor``, whose first size is symbolic; tensors with equal first sizes share a symbol."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode.shape_env = mode.shape_env or ShapeEnv()
    sizes = [DimDynamic.DUCK, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
    return mode.from_tensor(tensor, static_shapes=False, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


# Fake tensors with the strides that the CPU's kernels give, where torch's fake tensors have others; in torch 2.11 to 2.15.
#
# torch makes fake results of some pointwise operators by a decomposition, which takes operands in another order than the kernel
# does. While tracing, a reshape becomes a view if strides allow one. With wrong strides the graph then fails on real tensors,
# or sums in another order than eager mode does.


OTHERWISE = frozenset(
    f"aten::{name}"
    for name in (
        *("_log_softmax_backward_data", "binary_cross_entropy_backward", "copysign", "elu_backward", "floor_divide"),
        *("hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "huber_loss_backward", "log_sigmoid_forward"),
        *("logit_backward", "mse_loss_backward", "native_dropout_backward", "pow", "rrelu_with_noise_backward"),
        *("smooth_l1_loss_backward", "softplus_backward", "special_xlog1py", "xlogy"),
    )
)
"""Operators whose fake results have other strides than the kernel's; results have the shape that the operands broadcast to.

Found by calling all of aten with transposed operands.
"""


class KernelFakeMode(FakeTensorMode):
    """A fake mode that learns the strides of results of :data:`OTHERWISE` from the kernels, run on a few elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if getattr(func, "_schema", None) is None or func._schema.name not in OTHERWISE:
            return given
        operands = pytree.tensors_in((args, kwargs))
        # If all operands are contiguous, it makes no difference in which order they are taken.
        if all(operand.is_contiguous() or operand.device.type != "cpu" for operand in operands):
            return given
        with unseen(), torch.no_grad():
            small = func(*pytree.tree_map(_small, args), **pytree.tree_map(_small, kwargs))
        several = isinstance(given, (tuple, list))
        pairs = zip(given, small, strict=True) if several else [(given, small)]
        laid = tuple(self._laid_as(fake, one) for fake, one in pairs)
        return laid if several else laid[0]

    def _laid_as(self, fake: torch.Tensor, small: torch.Tensor) -> Any:
        strides = _dense(fake.shape, small)
        if strides == list(fake.stride()):
            return fake
        how = {"dtype": fake.dtype, "device": fake.device}
        return super().__torch_dispatch__(torch.ops.aten.empty_strided.default, (), (list(fake.shape), strides), how)


def _small(value: Any) -> Any:
    """Real zeros for a fake tensor: the same dimensions in the same order in memory, each of two elements at most."""
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [min(size, 2) for size in value.shape]
    order = sorted(range(value.dim()), key=lambda d: value.stride(d))
    strides, step = [0] * value.dim(), 1
    for d in order:
        strides[d] = step if value.stride(d) or sizes[d] == 1 else 0  # an expanded dimension stays expanded
        step *= sizes[d] if strides[d] else 1
    return torch.zeros(max(step, 1), dtype=value.dtype).as_strided(sizes, strides)


def _dense(shape: Sequence[int], small: torch.Tensor) -> list[int]:
    """Strides of a dense tensor of ``shape`` whose dimensions lie in memory in the order of those of ``small``."""
    strides, step = [1] * len(shape), 1
    for d in sorted(reversed(range(len(shape))), key=small.stride):
        strides[d] = step
        step *= max(shape[d], 1)
    return strides


# Parameters without memory in code that builds a model: ``Module._apply`` and dispatch modes, in torch 2.11 to 2.15.


Change = Callable[["nn.Module", str, "torch.Tensor"], "torch.Tensor"]


@contextmanager
def on_registration(change: Change) -> Iterator[None]:
    """In the block each parameter that a module gets is replaced by what ``change(module, name, parameter)`` gives.

    A module gets parameters by registration and by ``Module._apply``, which gives meta parameters memory (``to_empty``).
    """

    def registered(module: nn.Module, name: str, parameter: Any) -> Any:
        return None if parameter is None else change(module, name, parameter)

    def applied(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = apply(module, *args, **kwargs)
        held: dict[str, Any] = module._parameters
        held.update({name: change(module, name, parameter) for name, parameter in held.items() if parameter is not None})
        return given

    apply: Any = nn.Module._apply
    handle = register_module_parameter_registration_hook(registered)
    nn.Module._apply = applied  # type: ignore[assignment, method-assign]  # replaced for a while
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]  # replaced for a while
        handle.remove()


@contextmanager
def computing_without_values() -> Iterator[FakeTensorMode]:
    """In the block operators on fake tensors of the given mode, with real tensors beside them or not, give fake tensors.

    An initialiser that asks for a value is given 0 or False, with which it has nothing more to do; other code that asks gets
    torch's exception. ``Module.to`` and the like work on modules with fake parameters.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    swap = torch.utils.swap_tensors

    def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        if isinstance(one, FakeTensor):  # weak references to it, which torch's cache holds, forbid a true swap
            one.data = other.data
        else:
            swap(one, other)

    torch.utils.swap_tensors = swapped
    try:
        with _Valueless(mode):
            yield mode
    finally:
        torch.utils.swap_tensors = swap


class _Valueless(TorchDispatchMode):
    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and _in_initialiser():
            return False if args[0].dtype is torch.bool else 0
        with self._mode:
            return func(*args, **(kwargs or {}))


def _in_initialiser() -> bool:
    """Whether a caller writes in place by torch's naming: its name ends with one underscore, as ``trunc_normal_`` does."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if name.endswith("_") and not name.endswith("__"):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # the loop ends before None
    return False


# Identity of storages (``UntypedStorage._cdata``, in torch 2.11 to 2.15); meta tensors have no data pointer to compare.


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two living tensors exactly if they share a storage."""
    return int(tensor.untyped_storage()._cdata)


# Which kernels there are and how torch calls them: foreach, grouped products, devices.


def grouped(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """``tensors`` grouped by device and dtype, the groups in the order that torch's own grouping gives."""
    groups = _group_tensors_by_device_and_dtype([list(tensors)]).values()
    return [[tensor for tensor in lists[0] if tensor is not None] for lists, _ in groups]


@contextmanager
def takes_fake_tensors() -> Iterator[None]:
    """In the block torch decides for fake tensors as for real ones whether foreach calls can take them."""
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)


# Whether an operator can run on a device (``torch._C`` of torch 2.11 to 2.15; a CPU build knows it for CUDA in part only).


def has_kernel(operator: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether ``operator`` has a kernel for ``cpu``, ``cuda`` or ``meta``, be it one for all devices."""
    key = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}[device_type]
    name = operator._schema.name + (f".{operator._schema.overload_name}" if operator._schema.overload_name else "")
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key))


# ``_grouped_mm`` (``torch._meta_registrations``) traced for CPUs, which multiply any floating dtype; in torch 2.11 to 2.15.


@contextmanager
def of_any_dtype() -> Iterator[None]:
    """In the block ``_grouped_mm`` can be traced in float32 and the like: its fake kernel takes only CUDA's bfloat16."""
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
