"""Graphs that somebody else traced, with as much as they say about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.roles import WITHIN, Parameter, Phase, Role, StepGraph, Value

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.mesh import Mesh

_ROLES = tuple(role for role in get_args(Role) if role not in WITHIN)
_PHASES = ({"joint"}, {"forward", "backward"})


@dataclass(frozen=True)
class TracedStep:
    """What a ``[graph]`` factory returns.

    ``graphs`` is ``{"joint": gm}`` or ``{"forward": gm, "backward": gm}``; ``inputs`` gives each graph's real input tensors in
    order of its placeholders. ``roles`` and ``fqns`` give, for each graph, ``{"inputs": [...], "outputs": [...]}``: roles are
    param, buffer, batch; loss, grad; FQNs are those of the parameter or buffer, and free text for the rest. A parameter's input
    is its local shard. Left out, nothing is known of the graph: it is still run and compared.
    """

    graphs: Mapping[Phase, fx.GraphModule]
    inputs: Mapping[Phase, Sequence[torch.Tensor]]
    roles: Mapping[Phase, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    fqns: Mapping[Phase, Mapping[str, Sequence[str]]] = field(default_factory=dict)


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
    inputs = {phase: _values(given, phase, "inputs", where) for phase in given.graphs}
    outputs = {phase: _values(given, phase, "outputs", where) for phase in given.graphs}
    parameters = _parameters(inputs, outputs, mesh.degree("dp_shard"))
    _refuse_foreign_gradients(outputs, [p.fqn for p in parameters], where)
    return StepGraph(
        graphs=given.graphs,
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
        modules=modules_of([p.fqn for p in parameters]),
        mesh=mesh.dims,
        rank=rank,
        example_inputs={phase: tuple(given.inputs[phase]) for phase in given.graphs},
    )


def _refuse_other_graphs(given: TracedStep, where: str) -> None:
    from torch import fx

    if set(given.graphs) not in _PHASES:
        named = ", ".join(map(str, given.graphs)) or "none"
        raise CaptureError(f"{where}: graphs are to be joint, or forward and backward, but the TracedStep has {named}")
    for phase, graph in given.graphs.items():
        if not isinstance(graph, fx.GraphModule):
            raise CaptureError(f"{where}: the {phase} graph is a value of type {type(graph).__name__}, expected a GraphModule")
    for name, known in (("inputs", given.inputs), ("roles", given.roles), ("fqns", given.fqns)):
        if foreign := [str(phase) for phase in known if phase not in given.graphs]:
            raise CaptureError(f"{where}: {name} are given for {foreign[0]}, of which the TracedStep has no graph")


def _refuse_foreign_gradients(outputs: Mapping[Phase, tuple[Value, ...]], fqns: Sequence[str], where: str) -> None:
    for value in (value for values in outputs.values() for value in values if value.role == "grad"):
        if value.fqn not in fqns:
            near = get_close_matches(value.fqn, fqns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CaptureError(f"{where}: there is a gradient of {value.fqn!r}, but no input of role param has that FQN{hint}")


def _values(given: TracedStep, phase: Phase, side: str, where: str) -> tuple[Value, ...]:
    tensors = _tensors(given, phase, side, where)
    roles = given.roles.get(phase, {}).get(side)
    names = given.fqns.get(phase, {}).get(side)
    roles = ["value"] * len(tensors) if roles is None else list(roles)
    names = [str(i) for i in range(len(tensors))] if names is None else list(names)
    if not len(roles) == len(names) == len(tensors):
        raise CaptureError(
            f"{where}: {phase} graph has {len(tensors)} {side}, but {len(roles)} roles and {len(names)} FQNs are given for them"
        )
    if unknown := [role for role in roles if role not in _ROLES]:
        raise CaptureError(f"{where}: {phase} {side} have the unknown role {unknown[0]!r}; known are {', '.join(_ROLES)}")
    parameters = [name for role, name in zip(roles, names, strict=True) if role == "param"]
    if repeated := [name for name in parameters if parameters.count(name) > 1]:
        raise CaptureError(f"{where}: {phase} {side} have the parameter {repeated[0]!r} more than once")
    return tuple(
        Value(role, name, tuple(getattr(t, "shape", ())), getattr(t, "dtype", None))  # type: ignore[arg-type]  # a role
        for role, name, t in zip(roles, names, tensors, strict=True)
    )


def _tensors(given: TracedStep, phase: Phase, side: str, where: str) -> list[Any]:
    graph = given.graphs[phase].graph
    if side == "outputs":
        returned = graph.output_node().args[0]
        nodes = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        return [getattr(node, "meta", {}).get("val") for node in nodes]
    if phase not in given.inputs:
        raise CaptureError(f"{where} gave no inputs for its {phase} graph")
    placeholders = len(graph.find_nodes(op="placeholder"))
    if placeholders != len(given.inputs[phase]):
        raise CaptureError(
            f"{where}: {phase} graph takes {placeholders} inputs, but {len(given.inputs[phase])} tensors are given"
        )
    for i, value in enumerate(given.inputs[phase]):
        if not hasattr(value, "dtype"):
            raise CaptureError(
                f"{where}: input {i} of the {phase} graph is a value of type {type(value).__name__}, expected a tensor"
            )
    return list(given.inputs[phase])


def _parameters(
    inputs: Mapping[Phase, tuple[Value, ...]], outputs: Mapping[Phase, tuple[Value, ...]], world: int
) -> tuple[Parameter, ...]:
    trained = {value.fqn for values in outputs.values() for value in values if value.role == "grad"}
    found: dict[str, Parameter] = {}
    for values in inputs.values():
        for value in values:
            if value.role == "param" and value.fqn not in found and value.dtype is not None:
                shape = (value.shape[0] * world, *value.shape[1:]) if value.shape else ()
                found[value.fqn] = Parameter(value.fqn, (), shape, value.shape, value.dtype, value.fqn in trained)
    return tuple(found.values())


def modules_of(fqns: Sequence[str]) -> tuple[str, ...]:
    """Every module that a parameter's FQN goes through; the root is ''."""
    modules: dict[str, None] = {"": None}
    for fqn in fqns:
        parts = fqn.split(".")[:-1]
        modules.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return tuple(modules)
