"""Graphs that somebody else traced, with as much as they say about them; and the process groups that they name."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from pytest_fxbucket.compat.c10d import DEFAULT, group_ranks
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.collectives import read_launch
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.step.graph_sequence import HANDED, ORDER, refuse_unfitting
from pytest_fxbucket.step.roles import WITHIN, Parameter, Phase, Role, StepGraph, Value
from pytest_fxbucket.words import nearest

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.mesh import Mesh

_ROLES = tuple(role for role in get_args(Role) if role not in WITHIN)
_PARTED = ({"forward", "backward"}, {"forward", "input", "weight"})


@dataclass(frozen=True)
class TracedStep:
    """What a ``[graph]`` factory returns.

    ``graphs`` is ``{"joint": gm}`` or ``{"forward": gm, "backward": gm}``; ``inputs`` gives each graph's real input tensors in
    order of its placeholders. ``roles`` and ``fqns`` give, for each graph, ``{"inputs": [...], "outputs": [...]}``: roles are
    param, buffer, batch; loss, grad; FQNs are those of the parameter or buffer, and free text for the rest. A parameter's input
    is its local shard. Left out, nothing is known of the graph: it is still run and compared.

    Of a step whose FSDP collectives stand in graphs of their own, ``graphs`` has ``unshard`` before and ``reduce`` behind
    those two, or one of them; ``backward`` may be two, ``input`` and ``weight``. They run in this order, and what one hands to
    a later one has the same role and name on both sides: whole (a parameter, gathered), unreduced (a gradient before it is
    reduced), crossing (anything else, such as what forward saves). ``inputs`` are then those that no graph before hands on.

    :func:`~pytest_fxbucket.capture.placed_step` makes one of placements, and :func:`~pytest_fxbucket.capture.joint_step` of AOT
    autograd's descriptors.
    """

    graphs: Mapping[Phase, fx.GraphModule]
    inputs: Mapping[Phase, Sequence[torch.Tensor]]
    roles: Mapping[Phase, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    fqns: Mapping[Phase, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Full shapes of parameters by FQN; of one that is left out dimension 0 is taken to be sharded over ``dp_shard``."""
    copies: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Sets of ranks that must have the same of a parameter and its gradient, by FQN; of the loss under the empty name."""
    dims: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Dimensions of the mesh that the graphs were made for: by name the ranks along each, with this rank among them."""


def take_step(given: Any, plan: Plan, mesh: Mesh, rank: int) -> StepGraph:
    """``given`` by a factory, checked: a :class:`TracedStep`, or a bare (gm, inputs). Raises :class:`CaptureError`."""
    from torch import fx

    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], fx.GraphModule):
        given = TracedStep({"joint": given[0]}, {"joint": tuple(given[1])})
    where = f"[graph] factory {plan.graph.factory}" if plan.graph else "[graph]"
    if not isinstance(given, TracedStep):
        raise CaptureError(
            f"{where} gave a value of type {type(given).__name__}, expected a TracedStep or a tuple (gm, inputs)"
        )
    _refuse_other_graphs(given, where)
    refuse_other_mesh(given.dims, mesh, rank, where)
    phases = sorted(given.graphs, key=ORDER.index)
    inputs = {phase: _values(given, phase, "inputs", where) for phase in phases}
    outputs = {phase: _values(given, phase, "outputs", where) for phase in phases}
    refuse_unfitting(inputs, outputs, where)
    if any(value.role in HANDED for values in inputs.values() for value in values):
        _refuse_transforms(plan, where)
    parameters = _parameters(inputs, outputs, given.shapes, mesh.degree("dp_shard"))
    _refuse_foreign_gradients(outputs, [p.fqn for p in parameters], where)
    return StepGraph(
        graphs={phase: name_as_the_mesh_does(given.graphs[phase], mesh, rank, f"{where}: {phase} graph") for phase in phases},
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
        modules=modules_of([p.fqn for p in parameters]),
        mesh=mesh.dims,
        rank=rank,
        example_inputs={phase: tuple(given.inputs.get(phase, ())) for phase in phases},
        copies=given.copies,
    )


def _refuse_other_graphs(given: TracedStep, where: str) -> None:
    from torch import fx

    if set(given.graphs) != {"joint"} and set(given.graphs) - {"unshard", "reduce"} not in _PARTED:
        named = ", ".join(map(str, given.graphs)) or "none"
        raise CaptureError(
            f"{where}: graphs are to be joint, or forward and backward (or input and weight) with unshard before and reduce "
            f"behind them where they are split off, but the TracedStep has {named}"
        )
    for phase, graph in given.graphs.items():
        if not isinstance(graph, fx.GraphModule):
            raise CaptureError(f"{where}: the {phase} graph is a value of type {type(graph).__name__}, expected a GraphModule")
    for name, known in (("inputs", given.inputs), ("roles", given.roles), ("fqns", given.fqns)):
        if foreign := [str(phase) for phase in known if phase not in given.graphs]:
            raise CaptureError(f"{where}: {name} are given for {foreign[0]}, of which the TracedStep has no graph")


def _refuse_transforms(plan: Plan, where: str) -> None:
    other = next((one.name for one in plan.transform if one.name != "bucket"), None)
    if other is not None:
        raise CaptureError(
            f"{where}: the graphs hand values to each other, and [[transform]] {other} changes a step of one; leave it out"
        )


def _refuse_foreign_gradients(outputs: Mapping[Phase, tuple[Value, ...]], fqns: Sequence[str], where: str) -> None:
    for value in (value for values in outputs.values() for value in values if value.role == "grad"):
        if value.fqn not in fqns:
            hint = nearest(value.fqn, list(fqns))
            raise CaptureError(f"{where}: there is a gradient of {value.fqn!r}, but no input of role param has that FQN{hint}")


def _values(given: TracedStep, phase: Phase, side: str, where: str) -> tuple[Value, ...]:
    roles = given.roles.get(phase, {}).get(side)
    names = given.fqns.get(phase, {}).get(side)
    tensors = _outputs(given, phase) if side == "outputs" else _inputs(given, phase, roles or (), where)
    roles = ["value"] * len(tensors) if roles is None else list(roles)
    names = [str(i) for i in range(len(tensors))] if names is None else list(names)
    if not len(roles) == len(names) == len(tensors):
        raise CaptureError(
            f"{where}: {phase} graph has {len(tensors)} {side}, but {len(roles)} roles and {len(names)} FQNs are given for them"
        )
    known = _ROLES if phase == "joint" else (*_ROLES, *HANDED)
    if unknown := [role for role in roles if role not in known]:
        raise CaptureError(f"{where}: {phase} {side} have the unknown role {unknown[0]!r}; known are {', '.join(known)}")
    parameters = [name for role, name in zip(roles, names, strict=True) if role == "param"]
    if repeated := [name for name in parameters if parameters.count(name) > 1]:
        raise CaptureError(f"{where}: {phase} {side} have the parameter {repeated[0]!r} more than once")
    return tuple(
        Value(role, name, tuple(getattr(t, "shape", ())), getattr(t, "dtype", None))  # type: ignore[arg-type]  # a role
        for role, name, t in zip(roles, names, tensors, strict=True)
    )


def _outputs(given: TracedStep, phase: Phase) -> list[Any]:
    return [getattr(node, "meta", {}).get("val") for node in returned(given.graphs[phase].graph.output_node())]


def _inputs(given: TracedStep, phase: Phase, roles: Sequence[str], where: str) -> list[Any]:
    """The inputs of a graph: given tensors, and fake values of those that graphs before it hand on."""
    placeholders = given.graphs[phase].graph.find_nodes(op="placeholder")
    handed = [number for number, role in enumerate(roles[: len(placeholders)]) if role in HANDED]
    if phase not in given.inputs and len(handed) < len(placeholders):
        raise CaptureError(f"{where} gave no inputs for its {phase} graph")
    real, taken = list(given.inputs.get(phase, ())), len(placeholders) - len(handed)
    if taken != len(real):
        more = f" beside {len(handed)} that it is handed" if handed else ""
        raise CaptureError(f"{where}: {phase} graph takes {taken} inputs{more}, but {len(real)} tensors are given")
    for i, value in enumerate(real):
        if not hasattr(value, "dtype"):
            raise CaptureError(
                f"{where}: input {i} of the {phase} graph is a value of type {type(value).__name__}, expected a tensor"
            )
    rest = iter(real)
    return [node.meta.get("val") if number in handed else next(rest) for number, node in enumerate(placeholders)]


def _parameters(
    inputs: Mapping[Phase, tuple[Value, ...]],
    outputs: Mapping[Phase, tuple[Value, ...]],
    shapes: Mapping[str, Sequence[int]],
    world: int,
) -> tuple[Parameter, ...]:
    trained = {value.fqn for values in outputs.values() for value in values if value.role == "grad"}
    found: dict[str, Parameter] = {}
    for values in inputs.values():
        for value in values:
            if value.role == "param" and value.fqn not in found and value.dtype is not None:
                along_first = (value.shape[0] * world, *value.shape[1:]) if value.shape else ()
                shape = tuple(shapes.get(value.fqn, along_first))
                found[value.fqn] = Parameter(value.fqn, (), shape, value.shape, value.dtype, value.fqn in trained)
    return tuple(found.values())


def modules_of(fqns: Sequence[str]) -> tuple[str, ...]:
    """Every module that a parameter's FQN goes through; the root is ''."""
    modules: dict[str, None] = {"": None}
    for fqn in fqns:
        parts = fqn.split(".")[:-1]
        modules.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return tuple(modules)


# Process groups that somebody's tracing made, under the names that the plan's mesh gives groups of the same ranks.
#
# torch numbers groups in the order in which a process makes them, and ranks make other groups than the process that traced. By
# the mesh's names a graph means the same on all of them.


def name_as_the_mesh_does(module: fx.GraphModule, mesh: Mesh, rank: int, where: str) -> fx.GraphModule:
    """``module``, or a copy of it in which groups of ranks along ``mesh`` have the mesh's names for them.

    A group that this process does not know keeps its name. Raises :class:`CaptureError`, beginning with ``where``, for ranks
    that are along no dimension of the mesh.
    """
    known = _known(mesh, rank)
    names: dict[str, str] = {}
    for node in module.graph.nodes:
        launch = read_launch(node)
        if launch is None or launch.group in names or launch.group in known.values():
            continue
        try:
            ranks = group_ranks(launch.group)
        except KeyError:
            continue
        if len(ranks) > 1 and ranks not in known:
            raise CaptureError(f"{where} launches {launch.kind} ({node.name}) on {_ranks(ranks)}, {_no_dimension(mesh)}")
        if ranks in known:
            names[launch.group] = known[ranks]
    return _renamed(module, names) if names else module


def refuse_other_mesh(dims: Mapping[str, Sequence[int]], mesh: Mesh, rank: int, where: str) -> None:
    """Raise :class:`CaptureError` if ranks of one of ``dims``, by its name, are along no dimension of ``mesh``."""
    known = _known(mesh, rank)
    for name, ranks in dims.items():
        if len(ranks) > 1 and tuple(ranks) not in known:
            raise CaptureError(f"{where}: dimension {name} of its mesh has {_ranks(ranks)}, {_no_dimension(mesh)}")


def _known(mesh: Mesh, rank: int) -> dict[tuple[int, ...], str]:
    """Names of groups by their ranks."""
    return {tuple(range(mesh.size)): DEFAULT} | {ranks: name for name, ranks in mesh.groups(rank).items()}


def _no_dimension(mesh: Mesh) -> str:
    dims = ", ".join(f"{dim.name} = {dim.size}" for dim in mesh.dims)
    return f"which are along no dimension of [parallel]'s mesh ({dims}); let both meshes have the same sizes in the same order"


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _renamed(module: fx.GraphModule, names: dict[str, str]) -> fx.GraphModule:
    from torch import fx

    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        launch = read_launch(node)
        if launch is not None and launch.group in names:
            old, new = launch.group, names[launch.group]

            def other(argument: Any, old: str = old, new: str = new) -> Any:
                return new if argument == old and isinstance(argument, str) else argument

            node.args = tuple(other(argument) for argument in node.args)
            node.kwargs = {key: other(argument) for key, argument in node.kwargs.items()}
    return fx.GraphModule(module, graph)
