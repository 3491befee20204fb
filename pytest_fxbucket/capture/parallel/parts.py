"""Parameters of a model, and the part of each that a rank of the mesh holds."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pytest_fxbucket.capture.clip import Clip, NormDim
from pytest_fxbucket.capture.names import first_names, names_of
from pytest_fxbucket.capture.parallel.modes import ParallelMode, modes_of
from pytest_fxbucket.capture.parallel.tensor_parallel import parted_dim
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.schema_model import Parallel
from pytest_fxbucket.step.mesh import GROUPED, Mesh
from pytest_fxbucket.step.roles import Parameter
from pytest_fxbucket.user_frame import naming_user_frame


@dataclass(frozen=True, slots=True)
class ParameterShards:
    """What each rank of ``mesh`` holds of the parameters: parted by tp and ep first, then as the mode says."""

    mesh: Mesh
    parallel: Parallel
    dense: ParallelMode
    experts: ParallelMode

    @classmethod
    def of(cls, parallel: Parallel, mesh: Mesh, where: str = "[parallel] mode") -> ParameterShards:
        """Parts of parameters as ``parallel`` asks for; ``where`` begins errors of a mode of the user's own."""
        return cls(mesh, parallel, *modes_of(parallel, mesh, where))

    def mode(self, is_expert: bool) -> ParallelMode:
        """The mode by which a parameter is parted, gathered and reduced."""
        return self.experts if is_expert else self.dense

    def local(self, whole: torch.Tensor, tp_dim: int | None, is_expert: bool, rank: int) -> torch.Tensor:
        """The part of ``whole``, a view, that the data-parallel ranks with the tp and ep index of ``rank`` hold together."""
        if tp_dim is not None:
            whole = whole.chunk(self.mesh.degree("tp"), tp_dim)[self.mesh.at(rank, "tp")]
        if is_expert:
            whole = whole.chunk(self.mesh.degree("ep"), 0)[self.mesh.at(rank, "ep")]
        return whole

    def of_rank(self, whole: torch.Tensor, parameter: Parameter, rank: int) -> torch.Tensor:
        """The part of ``whole`` that ``rank`` holds: a new contiguous tensor."""
        local = self.local(whole, parameter.tp_dim, parameter.is_expert, rank)
        return self.mode(parameter.is_expert).part(local, self.mesh, rank)

    def parted_along(self, parameter: Parameter) -> tuple[str, ...]:
        """Mesh dimensions over which ``parameter`` is parted; along all others ranks hold the same."""
        mode = self.mode(parameter.is_expert)
        # ep and what is left of dp_shard, over which experts are parted, are dp_shard together.
        along = "dp_shard" if parameter.is_expert else mode.along
        return tuple(name for name in (along, "tp" if parameter.tp_dim is not None else "") if name)

    def copies(self, parameter: Parameter) -> list[list[int]]:
        """Sets of ranks that hold the same of ``parameter``."""
        dims, found = self.parted_along(parameter), dict[tuple[int, ...], list[int]]()
        for rank in range(self.mesh.size):
            found.setdefault(tuple(self.mesh.at(rank, dim) for dim in dims), []).append(rank)
        return [ranks for ranks in found.values() if len(ranks) > 1]

    def clip(self, max_norm: float, parameters: Sequence[Parameter]) -> Clip:
        """Clipping of the gradients of ``parameters`` by the norm of all, over all ranks."""
        sharded = {parameter.fqn: self.parted_along(parameter) for parameter in parameters}
        names = dict.fromkeys(name for dims in sharded.values() for name in dims)
        dims = [(name, self.mesh.group(name)) for name in sorted(names, key=GROUPED.index)]
        return Clip(max_norm, tuple(NormDim(name, group.name, group.size) for name, group in dims), sharded)


def describe_parameters(
    model: nn.Module, parts: ParameterShards, parted: Mapping[str, str], experts: Container[str]
) -> list[Parameter]:
    """Parameters of ``model`` in registration order.

    ``parted`` says of modules how their parameters are parted over tp, ``experts`` are the FQNs of those that are parted over
    ep. Raises :class:`CaptureError` for one that cannot be parted so.
    """
    names, first = names_of(model), first_names(model)
    places = {name: place for place, name in enumerate(names)}
    described = []
    for fqn, parameter in model.named_parameters():
        if parameter.dim() == 0 and ":" in parts.parallel.mode:
            raise CaptureError(
                f"parameter {fqn} has no dimension, and mode {parts.parallel.mode} may not expect that; give it the shape (1,)"
            )
        if parameter.is_complex() and parts.parallel.param_dtype is not None:
            raise CaptureError(
                f'parameter {fqn} is {parameter.dtype}, of which param_dtype = "{parts.parallel.param_dtype}" would drop the '
                "imaginary part, as FSDP2 does; leave param_dtype out, or hold real and imaginary parts as two parameters"
            )
        aliases = tuple(alias for alias, first in names.items() if first == fqn != alias)
        owners = {name: name.rpartition(".") for name in (fqn, *aliases)}
        dims = {
            name: parted_dim(parted[first[module]], last) if first[module] in parted else None
            for name, (module, _, last) in owners.items()
        }
        for alias, dim in dims.items():
            if dim != dims[fqn]:
                raise CaptureError(
                    f"tp_plan parts {fqn} and {alias} in two ways, but they are one tied parameter; give both one way"
                )
        _refuse_indivisible(fqn, parameter, dims[fqn], fqn in experts, parts.mesh)
        # Parts have one shape on all ranks, so the first rank's are described.
        local = parts.local(parameter, dims[fqn], fqn in experts, 0)
        with naming_user_frame(partial("mode {} of parameter {}".format, parts.parallel.mode, fqn)):
            part = parts.mode(fqn in experts).part(local, parts.mesh, 0)
        described.append(
            Parameter(
                fqn,
                aliases,
                tuple(parameter.shape),
                tuple(part.shape),
                parameter.dtype,
                parameter.requires_grad,
                tuple(local.shape),
                dims[fqn],
                fqn in experts,
                tuple(places[name] for name in (fqn, *aliases)),
            )
        )
    return described


def _refuse_indivisible(fqn: str, parameter: torch.Tensor, tp_dim: int | None, is_expert: bool, mesh: Mesh) -> None:
    for name, dim in (("tp", tp_dim), ("ep", 0 if is_expert else None)):
        degree = mesh.degree(name)
        if dim is None:
            continue
        if parameter.dim() <= dim or parameter.shape[dim] % degree:
            raise CaptureError(
                f"{name} = {degree} does not divide dimension {dim} of parameter {fqn}, "
                f"whose shape is {tuple(parameter.shape)}; "
                f"use another {name}, or leave {fqn.rpartition('.')[0] or 'it'} out of {name}_plan"
            )
