"""From a plan to a captured step: imports what the plan names, builds the model, and traces it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.capture.mesh import Mesh, fake_mesh
from pytest_fxbucket.plan.factories import import_callable

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.capture.joint import LossFn
    from pytest_fxbucket.capture.roles import StepGraph
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
    from pytest_fxbucket.plan.schema import Model, Plan


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

    from pytest_fxbucket.capture.batches import first_batch
    from pytest_fxbucket.capture.building import build
    from pytest_fxbucket.capture.twins import fake_twins, in_modules
    from pytest_fxbucket.compat.fake_strides import KernelFakeMode

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
    from pytest_fxbucket.capture.join import join, update_of
    from pytest_fxbucket.capture.joint import trace_joint
    from pytest_fxbucket.capture.optimizers.optimizing import optimizing_of
    from pytest_fxbucket.capture.override.overrides import overrides_of
    from pytest_fxbucket.capture.parallel.forwards import forwards_of
    from pytest_fxbucket.capture.parallel.parts import Parts
    from pytest_fxbucket.capture.roles import StepGraph, Told

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
    from pytest_fxbucket.capture.losses import own_loss

    factory = import_callable(model.factory, f"{where}: [model] factory")
    batch = import_callable(model.batch, f"{where}: [model] batch")
    loss = import_callable(model.loss, f"{where}: [model] loss") if model.loss else own_loss
    return factory, batch, loss
