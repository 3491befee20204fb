"""From a plan to a captured step: imports what the plan names, builds the model, and traces it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
from torch import fx, nn

from pytest_fxbucket.capture.batch import first_batch, own_loss
from pytest_fxbucket.capture.clip import Clip
from pytest_fxbucket.capture.given_graphs import take_step
from pytest_fxbucket.capture.joint import Joint, JointStep, trace_joint
from pytest_fxbucket.capture.model import build, fake_twins, in_modules
from pytest_fxbucket.capture.optimizers.optimizer import Optimizing, optimizing_of
from pytest_fxbucket.capture.optimizers.update import TracedUpdate, trace_update
from pytest_fxbucket.capture.override.overrides import Overrides, overrides_of
from pytest_fxbucket.capture.parallel.forwards import Forwards, forwards_of
from pytest_fxbucket.capture.parallel.parts import ParameterShards
from pytest_fxbucket.compat.fake_tensors import KernelFakeMode
from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Model
from pytest_fxbucket.step.mesh import Mesh, fake_mesh
from pytest_fxbucket.step.roles import Parameter, StepGraph, Transformed, Value
from pytest_fxbucket.user_frame import naming_user_frame

Step = TypeVar("Step", bound=JointStep)


def capture_plan(plan: Plan, mesh: Mesh, rank: int) -> StepGraph:
    """Step of ``plan`` as rank ``rank`` of ``mesh`` traces it, on fake process groups.

    Raises :class:`PlanError` for what cannot be imported, :class:`CaptureError` for what cannot be built or traced. The plan's
    folders must be on ``sys.path``.
    """
    with fake_mesh(mesh, rank):
        if plan.graph is not None:
            factory, name = import_callable(plan.graph.factory, f"{plan.path}: [graph] factory"), plan.graph.factory
            with naming_user_frame(lambda: f"[graph] factory {name}"):
                given = factory()
            return take_step(given, plan, mesh, rank)
        return _capture_model(plan, mesh, rank)


def _capture_model(plan: Plan, mesh: Mesh, rank: int) -> StepGraph:
    with model_traced(plan, mesh, rank) as model:
        joint = model.joint()
        graph, inputs, outputs, optimizing = joint.graph, joint.inputs, joint.outputs, None
        if plan.optimizer:
            optimizing = model.optimizing(joint.parameters)
            grads = {value.fqn for value in joint.outputs if value.role == "grad"}
            update = model.update(optimizing, joint.parameters, grads, model.clip(joint.parameters))
            graph, inputs, outputs = join(joint, update)
        return StepGraph(
            graphs={"joint": graph},
            inputs={"joint": inputs},
            outputs={"joint": outputs},
            parameters=joint.parameters,
            modules=model.modules,
            mesh=mesh.dims,
            rank=rank,
            optimizing=optimizing,
            notes=joint.notes,
            transformed=(Transformed("override", tuple(model.overrides.changes())),) if model.overrides else (),
            first_state=model.overrides.first_state,
        )


@dataclass(frozen=True)
class ModelTraced:
    """A plan's model, built, while fake tensors stand for its parameters and buffers."""

    plan: Plan
    built: nn.Module
    data: Any
    """The batch that the model is traced with."""
    loss: Callable[[Any, Any], Any]
    fake_mode: KernelFakeMode
    parts: ParameterShards
    forwards: Forwards
    overrides: Overrides
    inputs: Sequence[Any]
    """As in ``[model]``."""
    cuts: Sequence[str]
    """Modules behind which pipeline stages end."""

    @property
    def modules(self) -> tuple[str, ...]:
        """FQN of every module, in registration order."""
        return tuple(fqn for fqn, _ in self.built.named_modules())

    def joint(self) -> Joint:
        """Forward and backward of the whole step."""
        return trace_joint(self.built, lambda: self.step(JointStep))

    def step(self, kind: Callable[..., Step]) -> Step:
        """The step as a ``kind`` of :class:`JointStep`: other kinds trace it in another way."""
        return kind(
            *(self.built, self.data, self.loss, self.parts, self.forwards, self.fake_mode),
            *(self.plan.step.microbatches, self.overrides, self.inputs, self.cuts),
        )

    def optimizing(self, parameters: Sequence[Parameter]) -> Optimizing:
        """What makes the plan's optimizers."""
        return optimizing_of(self.plan, parameters, self.modules)

    def clip(self, parameters: Sequence[Parameter]) -> Clip | None:
        """Clipping as the plan asks for."""
        return self.parts.clip(self.plan.step.clip_norm, parameters) if self.plan.step.clip_norm else None

    def update(
        self, optimizing: Optimizing, parameters: Sequence[Parameter], grads: Collection[str], clip: Clip | None
    ) -> TracedUpdate:
        """The update of those of ``parameters`` whose FQNs are ``grads``."""
        values = [Value("param", one.fqn, one.shard_shape, one.dtype) for one in parameters]
        parted = any(self.parts.parted_along(parameter) for parameter in parameters)
        return trace_update(optimizing.build, values, grads, clip, parted)


@contextmanager
def model_traced(plan: Plan, mesh: Mesh, rank: int) -> Iterator[ModelTraced]:
    """The model of ``plan``, built, with fake parameters while inside. Needs the fake groups of ``rank`` in ``mesh``."""
    model = plan.model
    assert model is not None
    factory, batch, loss = import_model(model, str(plan.path))
    torch.manual_seed(plan.run.seed)
    built = build(factory, model.args, model.factory)
    data = first_batch(batch, model.batch, mesh, rank)
    fake_mode = KernelFakeMode(allow_non_fake_inputs=True)  # tensors that the model holds elsewhere
    with in_modules(built, fake_twins(built, fake_mode)):
        parts, forwards = ParameterShards.of(plan.parallel, mesh, f"{plan.path}: [parallel] mode"), forwards_of(built, plan)
        overrides = overrides_of(built, plan, forwards)
        cuts = plan.pipeline.cuts if plan.pipeline else ()
        yield ModelTraced(plan, built, data, loss, fake_mode, parts, forwards, overrides, model.inputs, cuts)


def import_model(model: Model, where: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[Any, Any], Any]]:
    """The factory, batch and loss that ``[model]`` names. Raises :class:`PlanError` for one that cannot be imported."""
    factory = import_callable(model.factory, f"{where}: [model] factory")
    batch = import_callable(model.batch, f"{where}: [model] batch")
    loss = import_callable(model.loss, f"{where}: [model] loss") if model.loss else own_loss
    return factory, batch, loss


# Forward and backward, and the update that follows, as one graph.


def join(joint: Joint, update: TracedUpdate) -> tuple[fx.GraphModule, tuple[Value, ...], tuple[Value, ...]]:
    """The whole step: its graph, inputs (parameters, buffers, state, learning rates, batch) and outputs (loss, gradients,
    new parameters, new state).

    Each gradient that ``joint`` gives is what ``update`` takes under that name; parameters are inputs of both.
    """
    graph, copies, constants = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
    before = list(zip(joint.graph.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    behind = list(zip(update.graph_module.graph.find_nodes(op="placeholder"), update.inputs, strict=True))
    # Order of inputs: parameters, buffers, state, learning rates, batch. Parameters and gradients that the update takes are no
    # inputs of their own: they are inputs and outputs of ``joint``.
    inputs = [pair for pair in before if pair[1].role != "batch"]
    inputs += [pair for pair in behind if pair[1].role in ("state", "hyper")]
    inputs += [pair for pair in before if pair[1].role == "batch"]
    for node, _ in inputs:
        copies[node] = graph.node_copy(node)
    known = {value.key: copies[node] for node, value in inputs}
    given = _copied(graph, joint.graph, copies, constants)
    known |= {value.key: node for value, node in zip(joint.outputs, given, strict=True)}
    copies |= {node: known[value.key] for node, value in behind}
    graph.output([*given, *_copied(graph, update.graph_module, copies, constants)])
    return uncompiled(constants, graph), tuple(value for _, value in inputs), (*joint.outputs, *update.outputs)


def _copied(
    graph: fx.Graph, source: fx.GraphModule, copies: dict[fx.Node, fx.Node], constants: dict[str, Any]
) -> list[fx.Node]:
    """Copy all nodes of ``source`` but its inputs to the end of ``graph``, each constant under a name of its own.

    Gives the copies of what it returns.
    """
    for node in source.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            value = getattr(source, str(node.target))
            names = (f"{node.target}_{number}" if number else str(node.target) for number in count())
            name = next(name for name in names if name not in constants or constants[name] is value)
            constants[name], copies[node].target = value, name
    returned: Any = source.graph.output_node().args[0]
    return [copies[node] for node in returned]
