"""How ``torch.distributed.fsdp.fully_shard`` shards a model's modules, read from its states; in torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from pytest_fxbucket.errors import CaptureError

_FSDP = "torch.distributed.fsdp._fully_shard"


class Ranks(NamedTuple):
    """A process group: its name, and the number of its ranks."""

    name: str
    size: int


class GradientDivision(NamedTuple):
    """How gradients are averaged: times ``before``, reduced by ``ops`` over shards and over copies, divided by ``after``."""

    before: float
    ops: tuple[str, str]
    after: float


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter under ``fully_shard``; it is sharded on dimension 0."""

    parameter: torch.Tensor
    """The DTensor that modules and optimizers have between steps."""
    shape: torch.Size
    """Shape of the gathered parameter, which the ranks of its group hold together."""
    padded: torch.Size
    """Shape of each rank's shard, with padding."""
    inner: Any
    """Spec of the gathered parameter, if that is a DTensor too."""
    over: Ranks
    """The ranks that the parameter is sharded over."""
    copies: Ranks | None
    """The ranks that hold copies of this rank's shard, if there are any."""
    summed_in: torch.dtype | None
    """dtype in which its gradient is summed over other dimensions of a mesh; None: the gradient's own."""
    held: Any
    group: Any

    def reduction(self, dtype: torch.dtype) -> GradientDivision:
        """How gradients that are reduced in ``dtype`` are averaged."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

        info, divisor = self.held.mesh_info, self.group.gradient_divide_factor
        copies = getattr(info, "replicate_process_group", None)
        before, after, *_ = _get_gradient_divide_factors(
            info.shard_process_group, copies, dtype, "cpu", divisor, self.group.force_sum_reduction_for_comms
        )
        # torch gives no factors where NCCL itself averages, by ``avg`` or by a premultiplied sum.
        if before is not None or after is not None:
            return GradientDivision(1 / (before or 1), ("sum", "sum"), after or 1)
        if divisor is None:
            return GradientDivision(1, ("avg", "avg"), 1)
        if divisor == self.over.size:
            return GradientDivision(1, ("avg", "sum"), 1)
        return GradientDivision(1 / divisor, ("sum", "sum"), 1)

    @property
    def flags(self) -> tuple[bool, bool]:
        """Whether its gradient is to be reduced now over shards, and over copies."""
        return bool(self.group.reduce_grads), bool(self.group.all_reduce_grads)

    @property
    def is_reduced(self) -> bool:
        """Whether its gradient is to be reduced now, and not kept for a later backward.

        Raises :class:`CaptureError` for one that is to be reduced over its shards alone.
        """
        reduced, averaged = self.flags
        if reduced and not averaged:
            raise CaptureError(
                "fully_shard is told set_requires_all_reduce(False), and a captured step reduces over all ranks at once; "
                "leave it out"
            )
        return reduced

    def stored(self) -> torch.Tensor:
        """This rank's shard with padding; the shard without padding lies in the same memory."""
        found: torch.Tensor = self.held._sharded_param_data
        return found.view(self.padded)


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules whose parameters ``fully_shard`` gathers together."""

    modules: tuple[nn.Module, ...]
    is_root: bool
    shards: tuple[Shard, ...]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    input_dtype: torch.dtype | None
    """dtype that floating inputs are cast to."""
    output_dtype: torch.dtype | None
    reshards: bool
    """Whether parameters are gathered for backward once more, after they were for forward."""


def units_of(model: nn.Module) -> list[Unit]:
    """Each unit of ``model``, in order of modules; all modules are resharded.

    Raises :class:`CaptureError` for settings of ``fully_shard`` that a graph cannot take over.
    """
    if _FSDP not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    # Modules wrapped together share one state. Outer modules come first, so a unit that is inside no unit before it is a root.
    found: dict[int, Unit] = {}
    inside: set[nn.Module] = set()
    for fqn, module in model.named_modules():
        sharded: Any = module
        if not isinstance(sharded, FSDPModule):
            continue
        sharded.reshard()
        state = sharded._get_fsdp_state()
        if id(state) not in found:
            found[id(state)] = _unit(fqn, state, is_root=module not in inside)
        inside.update(module.modules())
    return list(found.values())


def _unit(fqn: str, state: Any, *, is_root: bool) -> Unit:
    where, policy = f"module {fqn}" if fqn else "the model", state._mp_policy
    groups = _groups_of(state)
    for group in groups:
        _refuse_settings(where, group)
    held = [(group, one) for group in groups for one in group.fsdp_params]
    reduced = policy.reduce_dtype
    if reduced is None and policy.param_dtype is not None and held and makes_gradients_to_reduce():
        # From torch 2.15 on the dtype of the shards; before, that in which autograd made the gradients.
        reduced = held[0][1].sharded_param.dtype
    shards = tuple(_shard(where, group, one, reduced) for group, one in held)
    # torch settles in the first forward that the root stays gathered by default; the states do not say so before.
    stays = is_root and state._auto_reshard_after_forward
    reshards = not stays and any(group.post_forward_mesh_info is not None for group in groups)
    cast = policy.param_dtype if policy.cast_forward_inputs else None
    return Unit(tuple(state._modules), is_root, shards, policy.param_dtype, reduced, cast, policy.output_dtype, reshards)


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11 has one at most


def _refuse_settings(where: str, group: Any) -> None:
    changed = {
        "set_all_reduce_hook": getattr(group, "_all_reduce_hook", None) is not None,
        "set_custom_all_gather": _is_custom(getattr(group, "_all_gather_comm", None)),
        "set_custom_reduce_scatter": _is_custom(getattr(group, "_reduce_scatter_comm", None)),
        "an offload policy": bool(group.fsdp_params) and group.fsdp_params[0].offload_to_cpu,
    }
    if what := next((name for name, is_set in changed.items() if is_set), None):
        raise CaptureError(f"{where} is under fully_shard with {what}, which a captured step does not take over; leave it out")


def _is_custom(collective: object) -> bool:
    """Whether ``fully_shard`` was given ``collective`` by the user. torch's own place memory otherwise, and give the same."""
    return collective is not None and not type(collective).__module__.startswith("torch.")


def _shard(where: str, group: Any, held: Any, reduced: torch.dtype | None) -> Shard:
    info = held.mesh_info
    if held.fsdp_placement.dim != 0:
        raise CaptureError(
            f"a parameter of {where} is sharded by fully_shard on dimension {held.fsdp_placement.dim}; a captured step takes "
            "dimension 0"
        )
    if not hasattr(info, "shard_process_group"):
        raise CaptureError(f"{where} is replicated by fully_shard; a captured step takes what is sharded, or under DDP")
    replicas = getattr(info, "replicate_process_group", None)
    return Shard(
        held.sharded_param,
        torch.Size(held._orig_size),
        torch.Size(held.padded_sharded_param_size),
        held._unsharded_dtensor_spec if hasattr(held, "_unsharded_dtensor_spec") else getattr(held, "_tp_spec", None),
        Ranks(info.shard_process_group.group_name, info.shard_mesh_size),
        None if replicas is None else Ranks(replicas.group_name, info.replicate_mesh_size),
        reduced if getattr(held, "may_reduce_grad_outside_dp", False) else None,  # from torch 2.15 on
        held,
        group,
    )


def own_hooks(module: nn.Module) -> Iterator[tuple[Any, int]]:
    """Tables of ``module``, each with the number of a hook in it that ``fully_shard`` put there."""
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in table.items():
            if getattr(getattr(hook, "__wrapped__", hook), "__module__", "").startswith(_FSDP):
                yield table, number


# Sums of gradients within backward.


def without_input_nodes(model: nn.Module) -> None:
    """Have autograd add the gradients of values that units read in its own order, as without ``fully_shard``.

    Around each unit ``fully_shard`` puts an autograd node that gives the unit's inputs on, to know when the unit's backward is
    over; what the unit's own reads give is added there first. Without it gradients are reduced when all of backward is over.
    """
    for group in _groups_in(model):
        group._register_post_backward_hook = _as_they_are


def _as_they_are(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _groups_in(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    states = {id(state): state for one in model.modules() if isinstance(one, FSDPModule) for state in [one._get_fsdp_state()]}
    for state in states.values():
        yield from _groups_of(state)


# The dtype in which autograd makes gradients of parameters, which torch 2.15 changed.


def makes_gradients_to_reduce() -> bool:
    """Whether ``fully_shard`` has autograd make gradients in ``reduce_dtype``, not in the parameter's: from torch 2.15 on."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")


def gradients_of_parameters(model: nn.Module) -> None:
    """Have ``fully_shard`` make gradients in the parameter's dtype, and add them over several backwards in ``reduce_dtype``.

    torch before 2.15 does so by itself, and nothing is changed there.
    """
    for group in _groups_in(model) if makes_gradients_to_reduce() else ():
        _of_parameters(group)


def _of_parameters(group: Any) -> None:
    before, behind = group.pre_backward, group.post_backward
    earlier: dict[torch.Tensor, torch.Tensor] = {}

    def leaves() -> list[Any]:
        return [one._unsharded_param for one in group.fsdp_params if hasattr(one, "_unsharded_param")]

    def pre_backward(*given: Any) -> None:
        before(*given)
        for leaf in leaves():
            if leaf.grad is not None and leaf.grad.dtype != leaf.dtype:
                # A sum of earlier backwards. Autograd would add to it in its dtype, so it is put aside until this backward
                # ends.
                earlier[leaf], leaf.grad = leaf.grad, None
            leaf.grad_dtype = leaf.dtype

    @torch.no_grad()
    def post_backward(*given: Any) -> None:
        for leaf in leaves():
            made, sum_before = leaf.grad, earlier.pop(leaf, None)
            leaf.grad_dtype = None  # any dtype: a sum in ``reduce_dtype`` may be put there
            if sum_before is not None:
                leaf.grad = sum_before if made is None else sum_before.add_(made)
            elif made is not None and not group.reduce_grads:
                leaf.grad = made.to(group._reduce_dtype or made.dtype)
        behind(*given)

    group.pre_backward, group.post_backward = pre_backward, post_backward
