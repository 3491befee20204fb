"""A plan's model under torch's own data, tensor and sequence parallelism, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pytest_fxbucket.capture.names import called_within, names_of
from pytest_fxbucket.capture.parallel.forwards import Forwards, forwards_of
from pytest_fxbucket.capture.parallel.sequence_parallel import SEQUENCE
from pytest_fxbucket.compat.c10d import group_called
from pytest_fxbucket.compat.fsdp import gradients_of_parameters, without_input_nodes
from pytest_fxbucket.compat.tracing import without_onednn
from pytest_fxbucket.eager.expert_parallel import divide_over, part_experts, units_of_experts
from pytest_fxbucket.plan.factories import dtype_named
from pytest_fxbucket.plan.pass_consistency import entries_of
from pytest_fxbucket.plan.selectors import ResolvedEntry
from pytest_fxbucket.ranks import device

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.mesh import Mesh

_ALL = 1 << 30
"""Size in MB of a bucket that holds all gradients."""


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model whose parameters are this rank's parts, as torch deals them."""

    model: nn.Module
    call: Callable[[bool], Callable[..., Any]]
    """Takes whether it is the step's last microbatch, which reduces gradients, and gives what is called like the model."""
    units: Mapping[str, tuple[str, ...]]
    """FQNs of the parameters whose gradients are reduced together, by entry or "the root"; in registration order."""
    finish: Callable[[], None] = _nothing
    """What is done to gradients when backward of the last microbatch is over."""


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, *, reused: Collection[str], without_gradient: bool) -> ShardedModel:
    """``model`` under what ``plan`` asks for, on ``mesh``; it is changed in place.

    ``reused`` are modules that are to be the root's, and no units; ``without_gradient`` says that some parameter gets none.
    Raises what torch raises.
    """
    forwards = forwards_of(model, plan)
    mode = plan.parallel.mode
    along = mesh.data_parallel("dp_replicate" if mode == "replicate" else "dp_shard")
    dims = ("pp", *(("dp_replicate",) if mode == "hybrid_shard" else ()), along, "tp")
    # torch is asked for the dimension that it shards or copies over, so that is there even if it is one rank.
    sizes = {name: mesh.degree(name) for name in dims if name == along or mesh.degree(name) > 1}
    devices = init_device_mesh(torch.device(device()).type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    # tp first: FSDP2 shards what tp leaves to this rank.
    if forwards.parted or forwards.sequences.styles:
        parallelize(model, forwards, devices["tp"], bias_last="rowwise_bias" in plan.eager.rounds_otherwise)
    for module in model.modules() if "fused_rnn" in plan.eager.rounds_otherwise else ():
        if isinstance(module, nn.RNNBase):
            module.forward = without_onednn()(module.forward)
    if forwards.experts:
        part_experts(map(model.get_submodule, forwards.experts), group_called(mesh.group("ep").name))
    for fqn in forwards.recomputed:
        module = model.get_submodule(fqn)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if mode == "replicate":
        return _replicated(model, devices.get_group(along), plan, without_gradient)
    fqns = list(dict.fromkeys(names_of(model).values()))  # before torch puts parameters of its own in their place
    experts = _shard_experts(model, plan, mesh, forwards)
    kept = _shard(model, devices[tuple(name for name in sizes if name not in ("pp", "tp"))], plan, reused)
    if "gradient_dtype" in plan.eager.rounds_otherwise:
        gradients_of_parameters(model)
    if "shared_input" in plan.eager.rounds_otherwise:
        without_input_nodes(model)
    of_experts = {fqn for held in experts.values() for fqn in held}
    kept = {name: tuple(fqn for fqn in held if fqn not in of_experts) for name, held in kept.items()}
    theirs = {fqn for held in kept.values() for fqn in held} | of_experts
    kept["the root"] = tuple(fqn for fqn in fqns if fqn not in theirs)
    # FSDP2 averages over the ranks that share out an expert's rows, each of which has the tokens of all ranks of ep.
    reduced = dtype_named(plan.parallel.reduce_dtype or plan.parallel.param_dtype)
    averaged = [parameter for fqn, parameter in model.named_parameters() if fqn in of_experts]
    finish = partial(divide_over, averaged, mesh.degree("ep"), reduced)
    return ShardedModel(model, partial(_sharded_call, model), {**kept, **experts}, finish)


def _sharded_call(model: nn.Module, last: bool) -> Callable[..., Any]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    return model


def _replicated(model: nn.Module, group: dist.ProcessGroup, plan: Plan, without_gradient: bool) -> ShardedModel:
    is_planned = "ddp_buckets" in plan.eager.rounds_otherwise
    entries = {entry.name: entry.parameters for entry in _entries(model, plan)}
    # buffers stay each rank's own, as under FSDP2 and in the graph
    parallel = DistributedDataParallel(
        model,
        process_group=group,
        broadcast_buffers=False,
        find_unused_parameters=without_gradient,
        bucket_cap_mb=_ALL if is_planned else None,
    )
    # One bucket of a dtype comes to the hook, which reduces the entries' gradients one entry at a time.
    if is_planned:
        named = dict(model.named_parameters())
        units = [[named[fqn] for fqn in held] for held in entries.values()]
        # a lambda has no annotations: torch checks a hook's, and takes none that are text
        parallel.register_comm_hook(None, lambda state, bucket: _reduce_by_unit(units, group, bucket))

    def call(last: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if last else parallel.no_sync():
                return parallel(*args, **kwargs)

        return run

    return ShardedModel(model, call, entries)


def _reduce_by_unit(
    units: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup, bucket: Any
) -> torch.futures.Future[torch.Tensor]:
    """Average ``bucket``, all gradients of a dtype, unit by unit; a gradient that is in no unit is averaged by itself."""
    gradients = {id(one): gradient for one, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    taken = [[gradients.pop(id(one)) for one in unit if id(one) in gradients] for unit in units]
    for tensors in filter(None, [*taken, *([one] for one in gradients.values())]):
        flat = torch.cat([one.flatten() for one in tensors])
        dist.all_reduce(flat, dist.ReduceOp.AVG, group)
        for tensor, part in zip(tensors, torch.split(flat, [one.numel() for one in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    # The gradients are views of this buffer, so it holds the averages by now.
    done.set_result(bucket.buffer())
    return done


def _entries(model: nn.Module, plan: Plan) -> Sequence[ResolvedEntry]:
    return entries_of(plan, names_of(model), [fqn for fqn, _ in model.named_modules()]).entries


def _shard(model: nn.Module, devices: DeviceMesh, plan: Plan, left_out: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the parameters of each entry that is a unit."""
    parallel, entries = plan.parallel, _entries(model, plan)
    policy = MixedPrecisionPolicy(dtype_named(parallel.param_dtype), dtype_named(parallel.reduce_dtype))
    asked = parallel.reshard_after_forward
    reshard = asked if isinstance(asked, bool) else None  # a table by entry makes no difference to bits
    # What no other entry has is torch's root's, too: no module's, were one of that name.
    found = units(model, [entry for entry in entries if entry.name != plan.bucket.root], left_out)
    for modules in found.values():
        fully_shard(modules, mesh=devices, mp_policy=policy, reshard_after_forward=reshard)
    # Last, since the root takes all parameters that no unit has taken.
    fully_shard(model, mesh=devices, mp_policy=policy, reshard_after_forward=reshard)
    return {entry.name: entry.parameters for entry in entries if entry.name in found}


def _shard_experts(model: nn.Module, plan: Plan, mesh: Mesh, forwards: Forwards) -> dict[str, tuple[str, ...]]:
    """Shard modules of experts over what ep leaves of ``dp_shard``, and over the copies of ``hybrid_shard``."""
    if not forwards.experts:
        return {}
    dims = ("pp", "dp_replicate", "dp_shard_mod_ep", "ep", "tp")
    sizes = {name: mesh.degree(name) for name in dims if name == "dp_shard_mod_ep" or mesh.degree(name) > 1}
    devices = init_device_mesh(torch.device(device()).type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    over = devices[tuple(name for name in sizes if name in ("dp_replicate", "dp_shard_mod_ep"))]
    dtypes = dtype_named(plan.parallel.param_dtype), dtype_named(plan.parallel.reduce_dtype)
    found = units_of_experts(model, forwards.experts, _entries(model, plan))
    for unit in found.values():
        # The captured step casts what is given to modules that entries name.
        policy = MixedPrecisionPolicy(*dtypes, cast_forward_inputs=set(unit.modules) <= set(forwards.units))
        fully_shard([model.get_submodule(fqn) for fqn in unit.modules], mesh=over, mp_policy=policy)
    return {name: unit.parameters for name, unit in found.items()}


# Modules of a plan's entries, as ``fully_shard`` takes them: each entry one unit, and the rest with the root.


def units(model: nn.Module, entries: Sequence[ResolvedEntry], left_out: Collection[str] = ()) -> dict[str, list[nn.Module]]:
    """The modules of each entry, by its name, that can be a unit of its own; modules named in ``left_out`` belong to the root.

    What is sharded already, as experts are, is left as it is.
    For a container the modules in it count, since the container itself is not called. If two entries share a parameter, both
    are the root's, whose parameters all of the step can read. An entry that names a parameter alone has no module.
    """
    named = dict(model.named_modules())
    holders: dict[int, set[str]] = {}
    found: dict[str, list[nn.Module]] = {}
    sharded = {inner for module in model.modules() if isinstance(module, FSDPModule) for inner in module.modules()}
    for entry in entries:
        own = [fqn for fqn in entry.name.split("+") if fqn in named and fqn and named[fqn] not in sharded]
        called = [name for fqn in own for name in called_within(fqn, named[fqn])]
        if called and not any(fqn in left_out for fqn in called):
            found[entry.name] = [model.get_submodule(fqn) for fqn in called]
    # Which unit's modules hold each parameter: by two units, or by one and the root, it is shared.
    inside = {id(module): name for name, modules in found.items() for of in modules for module in of.modules()}
    for module in named.values():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(inside.get(id(module), ""))
    shared = {name for names in holders.values() if len(names) > 1 for name in names}
    return {name: modules for name, modules in found.items() if name not in shared}


# A model's modules under torch's own tensor and sequence parallelism.


def parallelize(model: nn.Module, forwards: Forwards, devices: DeviceMesh, *, bias_last: bool) -> None:
    """Part the modules of ``model`` over the mesh ``devices``, in place.

    ``bias_last``: the bias of a rowwise linear is added to the sum of the ranks' parts, not to one of them.
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
    names = names_of(model)
    if found:
        parallelize_module(model, devices, {fqn: style() for fqn, style in found.items()})
    # Each module was given a parameter of its own; those that were one are tied again.
    for name, first in names.items():
        if name != first:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, model.get_parameter(first))
    for fqn, style in forwards.parted.items():
        module = model.get_submodule(fqn)
        if style == "rowwise" and module.bias is not None and bias_last:
            _add_bias_last(module, Partial() if sequences.is_in_region(fqn) else Replicate())


class _AllRead(ParallelStyle):
    """Gathers the first input along the sequence, as ``PrepareModuleInput`` does, but for any number of inputs."""

    def __init__(self, *, as_local: bool) -> None:
        self._as_local = as_local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._gathered_arguments, device_mesh), with_kwargs=True)
        return module

    def _gathered_arguments(self, devices: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
