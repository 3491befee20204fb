"""What DeepSpeed and Megatron do with a stage, by their documentation, over real ranks: who calls what, sends what, and runs
backward from what. Microbatches run one after the other, forwards first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class LayerSpec:
    """A module to be built on the rank that has it."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not issubclass(typename, nn.Module):
            raise RuntimeError("LayerSpec only supports torch.nn.Module types.")
        self.build = partial(typename, *module_args, **module_kwargs)


class TiedLayerSpec(LayerSpec):
    """One of a group of layers with the same weights."""

    def __init__(
        self, key: str, typename: Any, *args: Any, forward_fn: Any = None, tied_weight_attr: Any = ("weight",), **kwargs: Any
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipelineModule(nn.Module):
    """The layers of one rank, of a uniform partition."""

    def __init__(self, layers: list[Any], num_stages: int, loss_fn: Any, partition_method: str) -> None:
        super().__init__()
        assert partition_method == "uniform"
        assert len(layers) % num_stages == 0
        self.loss_fn, self.num_stages, self.rank = loss_fn, num_stages, dist.get_rank()
        each = len(layers) // num_stages
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[[Any], Any]] = []
        self.keys: dict[str, str] = {}
        for index, layer in enumerate(layers[self.rank * each : (self.rank + 1) * each]):
            if isinstance(layer, TiedLayerSpec):
                self.keys[layer.key] = key = layer.key.replace(".", "/")
                if key not in self.tied_modules:
                    self.tied_modules[key] = layer.build()
                self.forward_funcs.append(partial(layer.forward_fn, self.tied_modules[key]))
            elif isinstance(layer, LayerSpec):
                self.add_module(str(index), layer.build())
                self.forward_funcs.append(getattr(self, str(index)))
            else:
                self.forward_funcs.append(layer)
        self.tied_comms = {}
        for key in sorted({layer.key for layer in layers if isinstance(layer, TiedLayerSpec)}):
            ranks = sorted({i // each for i, layer in enumerate(layers) if getattr(layer, "key", None) == key})
            group = dist.new_group(ranks)
            if self.rank in ranks:
                self.tied_comms[key] = group

    def forward(self, inputs: Any) -> Any:
        for function in self.forward_funcs:
            inputs = function(inputs)
        return inputs


def deepspeed_pipe() -> None:
    """Put the stand-in where the package would be."""
    package, pipe = ModuleType("deepspeed"), ModuleType("deepspeed.pipe")
    for made in (LayerSpec, TiedLayerSpec, PipelineModule):
        setattr(pipe, made.__name__, made)
    package.__path__ = []  # type: ignore[attr-defined]
    package.pipe = pipe  # type: ignore[attr-defined]
    sys.modules["deepspeed"], sys.modules["deepspeed.pipe"] = package, pipe


def _send_tuple(values: Any, to: int) -> None:
    assert isinstance(values, tuple)
    assert all(isinstance(value, Tensor) for value in values)
    dist.send_object_list([[(value.shape, value.dtype) for value in values]], to)  # type: ignore[no-untyped-call]
    for value in values:
        dist.send(value.detach(), to)


def _received_tuple(source: int) -> tuple[Tensor, ...]:
    said: list[Any] = [None]
    dist.recv_object_list(said, source)  # type: ignore[no-untyped-call]
    values = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in said[0])
    for value in values:
        dist.recv(value, source)
        value.requires_grad = value.is_floating_point()
    return values


def deepspeed_train_batch(module: PipelineModule, data: Iterator[Any], microbatches: int) -> list[Tensor]:
    """What DeepSpeed's engine does with a ``PipelineModule``; gradients are not scaled here."""
    rank, last = module.rank, module.num_stages - 1
    held: list[tuple[Any, Any]] = []
    losses = []
    for _ in range(microbatches):
        batch = next(data)
        inputs = batch[0] if rank == 0 else _received_tuple(rank - 1)
        outputs = module(tuple(value.clone() for value in inputs))
        if rank == last:
            outputs = module.loss_fn(outputs, batch[1])
            losses.append(outputs.detach())
        else:
            _send_tuple(outputs, rank + 1)
        held.append((inputs, outputs))
    for inputs, outputs in held:
        if rank == last:
            outputs.backward()
        else:
            floating = [value for value in outputs if value.is_floating_point()]
            for index, value in enumerate(floating):
                grad = torch.empty(value.shape, dtype=value.dtype)
                dist.recv(grad, rank + 1)
                value.backward(gradient=grad, retain_graph=index < len(floating) - 1)
        for value in inputs if rank else ():
            if value.is_floating_point():
                assert value.grad is not None
                dist.send(value.grad, rank - 1)
    for key, group in module.tied_comms.items():
        dist.all_reduce(module.tied_modules[module.keys[key]].weight.grad, group=group)
    return losses


def megatron_forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | None,
    model: nn.Module,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    adjust_tensor_shapes_fn: Callable[..., Any],
    forward_step: Callable[..., Any] | None = None,
    backward_step: Callable[..., Any] | None = None,
) -> list[Tensor]:
    """What Megatron's schedule without interleaving does with a model chunk, with its steps or those that are given."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dtype = model.config.pipeline_dtype
    (received,), (sent,) = adjust_tensor_shapes_fn([(seq_length, micro_batch_size, 1)], [(seq_length, micro_batch_size, 1)])
    held, losses = [], list[Any]()
    for _ in range(num_microbatches):
        given = None
        if rank:
            given = torch.empty(received, dtype=dtype, requires_grad=True)
            dist.recv(given.detach(), rank - 1)
        output = (forward_step or _megatron_forward)(
            forward_step_func, data_iterator, model, num_microbatches, given, losses, rank == last
        )
        if rank != last:
            assert output.shape == sent
            assert output.dtype == dtype
            assert output._base is None
            dist.send(output.detach(), rank + 1)
        held.append((given, output))
    for given, output in held:
        grad = None
        if rank != last:
            grad = torch.empty(sent, dtype=dtype)
            dist.recv(grad, rank + 1)
        grad = (backward_step or _megatron_backward)(given, output, grad)
        if rank:
            dist.send(grad, rank - 1)
    return losses


def _megatron_forward(
    function: Any, data: Any, model: Any, microbatches: int, given: Tensor | None, losses: list[Any], is_last: bool
) -> Tensor:
    model.set_input_tensor([given])
    output, loss_function = function(data, model)
    if is_last:
        output, reduced = loss_function(output)
        output /= microbatches
        losses.append(reduced["loss"])
    return output


def _megatron_backward(given: Tensor | None, output: Tensor, grad: Tensor | None) -> Tensor | None:
    if given is not None:
        given.retain_grad()
    torch.autograd.backward(output, grad_tensors=grad)
    return None if given is None else given.grad
