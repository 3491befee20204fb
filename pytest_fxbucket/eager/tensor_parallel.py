"""A model's modules under torch's own tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import linear

from pytest_fxbucket.capture.parallel.forwards import Forwards
from pytest_fxbucket.capture.parallel.sequence_parallel import SEQUENCE


def parallelize(model: nn.Module, forwards: Forwards, devices: DeviceMesh, *, bias_last: bool) -> None:
    """Part the modules of ``model`` over the mesh ``devices``, in place.

    ``bias_last``: biases of rowwise linears are added to sums.
    """
    sequences = forwards.sequences
    found: dict[str, Callable[[], ParallelStyle]] = {}
    for fqn, style in forwards.parted.items():
        on_parts = sequences.is_in_region(fqn)
        rowwise = partial(RowwiseParallel, output_layouts=Shard(SEQUENCE)) if on_parts else RowwiseParallel
        found[fqn] = ColwiseParallel if style == "colwise" else rowwise
    for fqn, style in sequences.styles.items():
        found[fqn] = _STYLES[style]
    found |= dict.fromkeys(sequences.alone, partial(SequenceParallel, sequence_dim=SEQUENCE, use_local_output=True))
    if found:
        parallelize_module(model, devices, {fqn: style() for fqn, style in found.items()})
    for fqn, style in forwards.parted.items():
        module = model.get_submodule(fqn)
        if style == "rowwise" and module.bias is not None and bias_last:
            _add_bias_last(module, Partial() if sequences.is_in_region(fqn) else Replicate())


class _AllRead(ParallelStyle):
    """The first input is gathered along the sequence: what ``PrepareModuleInput`` does, for any number of inputs."""

    def __init__(self, *, as_local: bool) -> None:
        self._as_local = as_local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._given, device_mesh), with_kwargs=True)
        return module

    def _given(self, devices: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._gathered(args[0], devices), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: self._gathered(kwargs[name], devices)}

    def _gathered(self, part: torch.Tensor, devices: DeviceMesh) -> torch.Tensor:
        whole = DTensor.from_local(part, devices, [Shard(SEQUENCE)], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local() if self._as_local else whole


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "sequence": partial(_AllRead, as_local=False),
    "gather": partial(_AllRead, as_local=True),
    "scatter": partial(PrepareModuleOutput, output_layouts=Replicate(), desired_output_layouts=Shard(SEQUENCE)),
}


def _add_bias_last(module: nn.Module, of_gradient: Partial | Replicate) -> None:
    """Add the bias of a rowwise linear to the sum of the ranks' parts, as Megatron-LM does, and not to a part of it."""
    module.forward = lambda x: linear(x, module.weight)  # type: ignore[arg-type]  # Module.__getattr__ is typed
    module.register_forward_hook(lambda module, given, out: out + module.bias.to_local(grad_placements=[of_gradient]))
