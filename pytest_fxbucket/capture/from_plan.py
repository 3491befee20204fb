"""From a plan to a captured step: imports what the plan names, builds the model as fake tensors, traces it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.capture.mesh import Mesh, fake_mesh
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.factories import import_callable

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.capture.roles import StepGraph
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

    from pytest_fxbucket.capture.forwards import forwards_of
    from pytest_fxbucket.capture.join import join
    from pytest_fxbucket.capture.joint import trace_joint
    from pytest_fxbucket.capture.optimizing import optimizing_of
    from pytest_fxbucket.capture.parts import Parts
    from pytest_fxbucket.capture.reusing import trace_reusing
    from pytest_fxbucket.capture.roles import StepGraph
    from pytest_fxbucket.capture.update import trace_update
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode

    factory, batch, loss = import_model(model, str(plan.path))
    torch.manual_seed(plan.run.seed)
    fake_mode = FakeTensorMode()
    with fake_mode, blamed(lambda: f"[model] factory {model.factory}"):
        built = factory(**model.args)
    if not isinstance(built, torch.nn.Module):
        raise CaptureError(
            f"[model] factory {model.factory} gave a value of type {type(built).__name__}, expected a torch.nn.Module"
        )
    with blamed(lambda: f"[model] batch {model.batch}"):
        data = batch(mesh.data_rank(rank), 0)
    if not isinstance(data, (tuple, list, dict)):
        raise CaptureError(
            f"[model] batch {model.batch} gave a value of type {type(data).__name__}, expected a tuple or a dict of inputs"
        )
    with blamed(lambda: f"[model] batch {model.batch}"):
        here, last = mesh.data_rank(rank), mesh.data_ranks - 1
        _refuse_other_batch(model.batch, data, batch(last, 1), f"rank {here}, step 0", f"rank {last}, step 1")
    parts, forwards = Parts.of(plan.parallel, mesh), forwards_of(built, plan)
    traced = trace_reusing if plan.step.reuse_layers else trace_joint
    joint = traced(built, data, loss, parts, forwards, fake_mode, plan.step.microbatches)
    graph, inputs, outputs = joint.graph, joint.inputs, joint.outputs
    optimizing = optimizing_of(plan, joint.parameters, [fqn for fqn, _ in built.named_modules()])
    if optimizing is not None:
        values = [value for value in joint.inputs if value.role == "param"]
        clip = parts.clip(plan.step.clip_norm, joint.parameters) if plan.step.clip_norm else None
        update = trace_update(optimizing.build, values, {v.fqn for v in joint.outputs if v.role == "grad"}, clip)
        graph, inputs, outputs = join(joint, update)
    return StepGraph(
        graphs={"joint": graph},
        inputs={"joint": inputs},
        outputs={"joint": outputs},
        parameters=joint.parameters,
        modules=tuple(fqn for fqn, _ in built.named_modules()),
        mesh=mesh.dims,
        rank=rank,
        optimizing=optimizing,
        reused=joint.reused,
    )


def _refuse_other_batch(name: str, first: Any, other: Any, here: str, there: str) -> None:
    """One graph serves every rank and step, so only the values of tensors may change from batch to batch."""
    if (a := _described(first)) != (b := _described(other)):
        changed = next((x, y) for x, y in zip_longest(a, b) if x != y)
        was, became = (" ".join(map(str, leaf)) if leaf else "nothing" for leaf in changed)
        raise CaptureError(
            f"[model] batch {name} gave {was} for {here}, but {became} for {there}; "
            "only the values of its tensors may change, since one graph serves all"
        )


def _described(batch: Any) -> list[tuple[object, ...]]:
    """Path of each leaf of ``batch``, with shape and dtype of a tensor, or the value of a plain constant."""
    import torch

    from pytest_fxbucket.compat import pytree

    found: list[tuple[object, ...]] = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append((pytree.keystr(path), tuple(leaf.shape), leaf.dtype))
        else:
            found.append((pytree.keystr(path), repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf)))
    return found


def import_model(model: Model, where: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[Any, Any], Any]]:
    """The factory, batch and loss that ``[model]`` names. Raises :class:`PlanError` for one that cannot be imported."""
    factory = import_callable(model.factory, f"{where}: [model] factory")
    batch = import_callable(model.batch, f"{where}: [model] batch")
    loss = import_callable(model.loss, f"{where}: [model] loss") if model.loss else own_loss
    return factory, batch, loss


def own_loss(output: Any, batch: Any) -> torch.Tensor:
    """``output.loss``, or the output itself: the loss of a plan that names none."""
    loss: torch.Tensor = getattr(output, "loss", output)
    return loss
