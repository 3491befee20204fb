"""From a plan to a captured step: imports what the plan names, builds the model, and traces it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from pytest_fxbucket.capture.optimizers.update import trace_update
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.step.mesh import Mesh, fake_mesh
from pytest_fxbucket.step.roles import Value
from pytest_fxbucket.user_frame import blamed

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.capture.joint import Joint, LossFn
    from pytest_fxbucket.capture.optimizers.optimizer import Optimizing
    from pytest_fxbucket.capture.optimizers.update import TracedUpdate
    from pytest_fxbucket.capture.parallel.parts import Parts
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
    from pytest_fxbucket.plan.schema import Model, Plan
    from pytest_fxbucket.step.roles import StepGraph


def capture_plan(plan: Plan, mesh: Mesh, rank: int) -> StepGraph:
    """Step of ``plan`` as rank ``rank`` of ``mesh`` traces it, on fake process groups.

    Raises :class:`PlanError` for what cannot be imported, :class:`CaptureError` for what cannot be built or traced. The plan's
    folders must be on ``sys.path``.
    """
    with fake_mesh(mesh, rank):
        if plan.graph is not None:
            from pytest_fxbucket.capture.traced import take_step

            factory = import_callable(plan.graph.factory, f"{plan.path}: [graph] factory")
            with blamed(lambda: f"[graph] factory {plan.graph.factory}"):  # type: ignore[union-attr]
                given = factory()
            return take_step(given, plan, mesh, rank)
        assert plan.model is not None
        return _capture_model(plan, plan.model, mesh, rank)


def _capture_model(plan: Plan, model: Model, mesh: Mesh, rank: int) -> StepGraph:
    import torch

    from pytest_fxbucket.capture.batch import first_batch
    from pytest_fxbucket.capture.model import build, fake_twins, in_modules
    from pytest_fxbucket.compat.fake_tensors import KernelFakeMode

    factory, batch, loss = import_model(model, str(plan.path))
    torch.manual_seed(plan.run.seed)
    built = build(factory, model.args, model.factory)
    data = first_batch(batch, model.batch, mesh, rank)
    fake_mode = KernelFakeMode(allow_non_fake_inputs=True)  # tensors that the model holds elsewhere
    with in_modules(built, fake_twins(built, fake_mode)):
        return _trace(plan, built, data, loss, mesh, rank, fake_mode)


def _trace(
    plan: Plan, built: nn.Module, data: Any, loss: LossFn, mesh: Mesh, rank: int, fake_mode: FakeTensorMode
) -> StepGraph:
    """The step of ``built``, whose parameters and buffers are fake tensors of ``fake_mode``."""
    from pytest_fxbucket.capture.joint import trace_joint
    from pytest_fxbucket.capture.optimizers.optimizer import optimizing_of
    from pytest_fxbucket.capture.override.overrides import overrides_of
    from pytest_fxbucket.capture.parallel.forwards import forwards_of
    from pytest_fxbucket.capture.parallel.parts import Parts
    from pytest_fxbucket.step.roles import StepGraph, Told

    given = plan.model.inputs if plan.model is not None else ()
    parts, forwards = Parts.of(plan.parallel, mesh, f"{plan.path}: [parallel] mode"), forwards_of(built, plan)
    overrides = overrides_of(built, plan, forwards)
    joint = trace_joint(built, data, loss, parts, forwards, fake_mode, plan.step.microbatches, overrides, given)
    graph, inputs, outputs, optimizing = joint.graph, joint.inputs, joint.outputs, None
    if plan.optimizer:
        optimizing = optimizing_of(plan, joint.parameters, [fqn for fqn, _ in built.named_modules()])
        graph, inputs, outputs = join(joint, update_of(joint, optimizing, parts, plan.step.clip_norm))
    return StepGraph(
        graphs={"joint": graph},
        inputs={"joint": inputs},
        outputs={"joint": outputs},
        parameters=joint.parameters,
        modules=tuple(fqn for fqn, _ in built.named_modules()),
        mesh=mesh.dims,
        rank=rank,
        optimizing=optimizing,
        notes=joint.notes,
        told=(Told("override", tuple(overrides.told())),) if overrides else (),
        first_state=overrides.first_state,
    )


def import_model(model: Model, where: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[Any, Any], Any]]:
    """The factory, batch and loss that ``[model]`` names. Raises :class:`PlanError` for one that cannot be imported."""
    from pytest_fxbucket.capture.batch import own_loss

    factory = import_callable(model.factory, f"{where}: [model] factory")
    batch = import_callable(model.batch, f"{where}: [model] batch")
    loss = import_callable(model.loss, f"{where}: [model] loss") if model.loss else own_loss
    return factory, batch, loss


# Forward and backward, and the update that follows, as one graph.


Key = tuple[str, str]
"""Role and name of an input or output."""


def join(joint: Joint, update: TracedUpdate) -> tuple[fx.GraphModule, tuple[Value, ...], tuple[Value, ...]]:
    """The whole step: its graph, inputs (parameters, buffers, state, learning rates, batch) and outputs (loss, gradients,
    new parameters, new state).

    Each gradient that ``joint`` gives is what ``update`` takes under that name; parameters are inputs of both.
    """
    graph, root = fx.Graph(), _Root()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [*_ordered(_placeholders(joint.graph, joint.inputs), _new(update))]
    for node, _ in inputs:
        copies[node] = graph.node_copy(node)
    for node in joint.graph.graph.nodes:
        if node.op not in ("placeholder", "output"):
            root.copy(graph, joint.graph, node, copies)
    known = {(value.role, value.fqn): copies[node] for node, value in inputs}
    given = _returned(joint.graph, copies)
    known |= {(value.role, value.fqn): node for value, node in zip(joint.outputs, given, strict=True)}
    for node, value in _placeholders(update.graph_module, update.inputs):
        copies[node] = known[value.role, value.fqn]
    for node in update.graph_module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            root.copy(graph, update.graph_module, node, copies)
    graph.output([*given, *_returned(update.graph_module, copies)])
    return fx.GraphModule(root.values, graph), tuple(value for _, value in inputs), (*joint.outputs, *update.outputs)


def _placeholders(graph_module: fx.GraphModule, values: Sequence[Value]) -> list[tuple[fx.Node, Value]]:
    return list(zip(graph_module.graph.find_nodes(op="placeholder"), values, strict=True))


def _new(update: TracedUpdate) -> list[tuple[fx.Node, Value]]:
    """Inputs of ``update`` that are inputs of the whole step, and of nothing before it."""
    return [pair for pair in _placeholders(update.graph_module, update.inputs) if pair[1].role in ("state", "hyper")]


def _ordered(before: Sequence[tuple[fx.Node, Value]], new: Sequence[tuple[fx.Node, Value]]) -> Iterator[tuple[fx.Node, Value]]:
    yield from (pair for pair in before if pair[1].role != "batch")
    yield from new
    yield from (pair for pair in before if pair[1].role == "batch")


def _returned(graph_module: fx.GraphModule, copies: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    returned: Any = graph_module.graph.output_node().args[0]
    return [copies[node] for node in returned]


class _Root:
    """Constants of both graphs, each under a name of its own."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """By the name that the joined graph uses."""

    def copy(self, graph: fx.Graph, source: fx.GraphModule, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
        """Copy ``node`` of ``source`` to the end of ``graph``, with the constant that it names."""
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        if node.op != "get_attr":
            return
        value = getattr(source, str(node.target))
        name, number = str(node.target), 1
        while name in self.values and self.values[name] is not value:
            name, number = f"{node.target}_{number}", number + 1
        self.values[name] = value
        copy.target = name


def update_of(joint: Joint, optimizing: Optimizing, parts: Parts, clip_norm: float) -> TracedUpdate:
    """The update that follows ``joint``, clipped to ``clip_norm`` if that is not 0. Raises what :func:`trace_update` does."""
    values = [value for value in joint.inputs if value.role == "param"]
    clip = parts.clip(clip_norm, joint.parameters) if clip_norm else None
    grads = {value.fqn for value in joint.outputs if value.role == "grad"}
    parted = any(parts.parted_along(parameter) for parameter in joint.parameters)
    return trace_update(optimizing.build, values, grads, clip, parted)
