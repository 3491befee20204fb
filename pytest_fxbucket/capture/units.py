"""Modules that entries of the plan name: units, as FSDP2 calls what shares one gather. Each gets its inputs in param_dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.compat.cast_inputs import each_tensor
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import Entry
from pytest_fxbucket.plan.selector import resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pytest_fxbucket.capture.names import NodeNamer


def units_of(model: nn.Module, entries: Sequence[Entry]) -> list[str]:
    """FQN of each module that ``entries`` name; what names nothing is left to the plan's own resolution, which says so."""
    modules = [fqn for fqn, _ in model.named_modules()]
    parameters = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, None] = {}
    for selector in dict.fromkeys(selector for entry in entries for selector in entry.selectors):
        try:
            resolved = resolve([Entry(selector, (selector,))], parameters, modules, unplanned="allow")
        except PlanError:
            continue
        found.update(dict.fromkeys(one.name for one in resolved.entries if one.name in modules))
    return list(found)


@contextmanager
def inputs_cast(model: nn.Module, units: Sequence[str], dtype: torch.dtype | None, namer: NodeNamer) -> Iterator[None]:
    """While inside, floating inputs of ``units`` of ``model`` are cast to ``dtype``, as FSDP2's cast_forward_inputs does."""
    handles = []
    if dtype is not None:
        for fqn in units:
            hook = partial(_cast, fqn, dtype, namer)
            handles.append(model.get_submodule(fqn).register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cast(
    fqn: str, dtype: torch.dtype, namer: NodeNamer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    with namer.inside(fqn):
        return each_tensor(cast, args), each_tensor(cast, kwargs)
