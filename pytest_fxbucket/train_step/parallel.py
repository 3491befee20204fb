"""Shards a user's model over ranks, by torch's own means, before its step is captured; and cuts each rank's part of a batch."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.dtensors import is_dtensor, spec_of
from pytest_fxbucket.compat.fsdp import Ranks
from pytest_fxbucket.compat.modules import plain_fqn
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.user_frame import naming_user_frame
from pytest_fxbucket.words import show

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MODES = ("fully_shard", "hybrid_shard", "replicate")
Parallelize = Callable[[nn.Module, "DeviceMesh"], Any]
"""A callable that shards a model in place."""
Parallel = str | Mapping[str, Any] | Parallelize
"""One of :data:`MODES`; or for tensor parallelism a mapping of module paths (with ``*``) to "colwise", "rowwise" or a
``ParallelStyle``; or a callable."""
BatchDim = int | None | Mapping[str, int | None]
_TP = "tp"


@dataclass(frozen=True)
class ShardedSetup:
    """How the model of a step was sharded, and how its batch is cut."""

    mesh: DeviceMesh
    batch_dim: BatchDim
    averages: bool
    """Whether gradients are averaged over all ranks, since every rank has all parameters."""

    @property
    def averaged(self) -> Ranks | None:
        """The ranks over which those gradients are averaged that neither FSDP nor DDP reduces."""
        if not self.averages:
            return None
        group = _data(self.mesh).get_group()
        return Ranks(group.group_name, group.size())

    @property
    def ranks(self) -> tuple[int, int]:
        """(place of this rank, number of them) among the ranks that get different parts of the batch: ranks of tp share one."""
        place, count = 0, 1
        for dim, name in enumerate(self.mesh.mesh_dim_names or [""] * self.mesh.ndim):
            if name != _TP:
                place, count = place * self.mesh.size(dim) + self.mesh.get_local_rank(dim), count * self.mesh.size(dim)
        return place, count

    def of_batch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """This rank's part of each tensor among the arguments. Raises :class:`CaptureError` for one that cannot be cut so."""
        if self.batch_dim is None:
            return args, kwargs
        taken = inspect.signature(function)
        dims = self.batch_dim if isinstance(self.batch_dim, Mapping) else dict.fromkeys(taken.parameters, self.batch_dim)
        if unknown := next((name for name in dims if name not in taken.parameters), None):
            raise CaptureError(f"batch_dim has {show(unknown)}, and the step has no argument of that name")
        try:
            bound = taken.bind(*args, **kwargs)
        except TypeError as error:
            raise CaptureError(f"the step takes {taken}, and is called otherwise: {error}") from None
        for name, value in bound.arguments.items():
            dim = dims.get(name, 0)
            bound.arguments[name] = value if dim is None else _part(name, value, dim, self.ranks)
        return bound.args, bound.kwargs


def _part(name: str, value: Any, dim: int, ranks: tuple[int, int]) -> Any:
    place, count = ranks

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] % count:
            raise CaptureError(
                f"argument {name} of shape {tuple(tensor.shape)} cannot be parted over {count} ranks along dimension {dim}; "
                f'give batch_dim its own dimension, or None if all ranks take all of it: batch_dim={{"{name}": None}}'
            )
        return tensor.chunk(count, dim)[place]

    return pytree.map_tensors(part, value)


def part_model(
    model: nn.Module, optimizers: Sequence[Optimizer], parallel: Parallel | Sequence[Parallel], mesh: DeviceMesh | None,
    batch_dim: BatchDim, sync: bool,
) -> ShardedSetup:  # fmt: skip
    """Shard ``model`` in place, and exchange the parameters of ``optimizers`` for the sharded ones, with their state.

    Raises :class:`CaptureError` for ranks that begin with different values, and for a model that cannot be sharded so.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise CaptureError("parallel is given, and there is no process group; call torch.distributed.init_process_group first")
    ways = [parallel] if isinstance(parallel, (str, Mapping)) or callable(parallel) else list(parallel)
    mesh = _mesh(ways, mesh)
    # Each rank keeps a part of its own values, so ranks that began with others would train a mix of both models.
    _agree(model, sync)
    before = _by_plain_name(model)
    done: list[str] = []
    try:
        with torch.no_grad():
            for way in ways:
                with naming_user_frame(partial("parallel {}".format, _called(way))):
                    _apply(model, way, mesh)
                done.append(_called(way))
    except CaptureError as error:
        # A way that fails may have parted some modules; one that succeeds, as "replicate", may have parted none.
        if {id(parameter) for parameter in before.values()} <= {id(parameter) for parameter in model.parameters()}:
            raise
        how = f"by {', '.join(done)}" if done else "in part"
        raise CaptureError(f"{error}; the model is parted {how} already, make it anew") from error
    finally:  # after an error, too, optimizers have the parameters that the model has
        lost = _exchange(optimizers, before, _by_plain_name(model))
    if lost:
        raise CaptureError(
            f"parallel leaves the model without its parameter {lost[0]}; wrap and shard modules, and keep the names of their "
            "parameters"
        )
    return ShardedSetup(mesh, batch_dim, "replicate" in ways)


def _mesh(ways: Iterable[Parallel], mesh: DeviceMesh | None) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise CaptureError(
            f"mesh is a value of type {type(mesh).__name__}, expected a torch.distributed.device_mesh.DeviceMesh"
        )
    ways = list(ways)
    for way in ways:
        if isinstance(way, str) and way not in MODES:
            raise CaptureError(f"parallel is {show(way)}; known are {', '.join(MODES)}, modules for tp, and callables")
    if mesh is None:
        if "hybrid_shard" in ways:
            raise CaptureError('parallel = "hybrid_shard" needs a mesh of two dimensions, copies first')
        name = _TP if all(isinstance(way, Mapping) for way in ways) else "dp_shard"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=(name,))
    return mesh


def _data(mesh: DeviceMesh) -> DeviceMesh:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != _TP)
    return mesh[names] if names and len(names) < mesh.ndim else mesh


def _apply(model: nn.Module, way: Parallel, mesh: DeviceMesh) -> None:
    if isinstance(way, str):
        _shard(model, way, _data(mesh))
    elif isinstance(way, Mapping):
        _over_tp(model, way, mesh)
    else:
        given = way(model, mesh)
        if given is not None and given is not model:
            raise CaptureError(f"parallel {_called(way)} gave another module, where the model itself is to be parted")


def _called(way: Parallel) -> str:
    if isinstance(way, str):
        return show(way)
    return "over tp" if isinstance(way, Mapping) else str(getattr(way, "__qualname__", way))


def _shard(model: nn.Module, mode: str, mesh: DeviceMesh) -> None:
    dims = 2 if mode == "hybrid_shard" else 1
    if mesh.ndim != dims:
        raise CaptureError(f'parallel = "{mode}" takes a mesh of {dims} dimensions beside tp, and this one has {mesh.ndim}')
    if mode == "replicate":  # the graph itself averages gradients, see ShardedSetup.averaged
        return
    from torch.distributed.fsdp import fully_shard

    # Several models are children of a container, and fully_shard refuses a container, which has no forward.
    containers = (nn.ModuleDict, nn.ModuleList)
    for module in model.children() if isinstance(model, containers) else (model,):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


def _over_tp(model: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    names = [fqn for fqn, _ in model.named_modules()]
    given = {}
    for fqn, style in plan.items():
        if isinstance(style, str) and style not in styles:
            raise CaptureError(
                f"parallel has {show(fqn)} = {show(style)}; known are colwise, rowwise and ParallelStyle objects"
            )
        if "*" not in fqn and fqn not in names:
            raise CaptureError(f"parallel has {show(fqn)}, and the model has no module of that name")
        given[fqn] = styles[style]() if isinstance(style, str) else style
    # A mesh of one dimension is taken whatever that is called.
    parallelize_module(model, mesh[_TP] if mesh.ndim > 1 else mesh, given)


def _agree(model: nn.Module, sync: bool) -> None:
    """Broadcast the values of rank 0, or without ``sync`` raise :class:`CaptureError` if ranks hold different values."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # What a rank holds of a DTensor differs from rank to rank by design.
    whole = {fqn: tensor for fqn, tensor in held.items() if not is_dtensor(tensor)}
    # Also before values are sent: a rank with a tensor more or less would wait for the others, or take one for another.
    own = {fqn: str((tuple(tensor.shape), tensor.dtype)) if sync else _digest(tensor) for fqn, tensor in whole.items()}
    every: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own)
    for rank, theirs in enumerate(every):
        if fqn := next((fqn for fqn in [*every[0], *theirs] if theirs.get(fqn) != every[0].get(fqn)), None):
            if sync or fqn not in theirs or fqn not in every[0]:
                raise CaptureError(
                    f"rank {rank} has another model than rank 0, first at {fqn}; build the same one on all ranks"
                )
            what = "parameter" if fqn in dict(model.named_parameters()) else "buffer"
            raise CaptureError(
                f"rank {rank} begins with another {what} {fqn} than rank 0; seed all ranks alike, or give sync=True, which "
                "sends what rank 0 has"
            )
    if sync:
        with torch.no_grad():
            for tensor in whole.values():
                sent = tensor.contiguous()  # gloo takes the memory from its beginning on, whatever the strides
                dist.broadcast(sent, 0)
                if sent is not tensor:
                    tensor.copy_(sent)


def _digest(tensor: torch.Tensor) -> str:
    # In bytes, since numpy has no bfloat16; flat first, since a tensor without dimensions has no view in bytes.
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + data).hexdigest()


def _by_plain_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by names that stay the same when modules are wrapped."""
    return {plain_fqn(fqn, model): parameter for fqn, parameter in model.named_parameters()}


def _exchange(
    optimizers: Sequence[Optimizer], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> list[str]:
    """Exchange in ``optimizers`` the parameters ``before`` for those ``after``; state is sharded as its parameter is.

    Gives FQNs that are no longer there.
    """
    new = {id(parameter): after[fqn] for fqn, parameter in before.items() if fqn in after}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter, state in list(optimizer.state.items()):
            found = new.get(id(parameter))
            if found is not None and found is not parameter:
                del optimizer.state[parameter]
                optimizer.state[found] = {key: _parted_alike(value, found) for key, value in state.items()}
    return [fqn for fqn in before if fqn not in after]


def _parted_alike(value: Any, parameter: torch.Tensor) -> Any:
    # Moments have the parameter's shape and are sharded as it is; a step counter stays whole. Nothing is sent, since every rank
    # has the whole value.
    if not is_dtensor(parameter) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    spec = spec_of(parameter)
    return distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
