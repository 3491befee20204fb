"""From a plan to a captured step: imports what the plan names, builds the model as fake tensors, traces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.compat.fake_group import fake_world
from pytest_fxbucket.errors import CaptureError, PlanError
from pytest_fxbucket.plan.factories import import_callable

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.capture.roles import StepGraph
    from pytest_fxbucket.plan.schema import Model, Plan


def capture_plan(plan: Plan, world: int, rank: int) -> StepGraph:
    """Step of ``plan`` as rank ``rank`` of ``world`` traces it, on fake process groups.

    Raises :class:`PlanError` for what cannot be imported, :class:`CaptureError` for what cannot be built or traced. The plan's
    folders must be on ``sys.path``.
    """
    with fake_world(rank, world):
        if plan.graph is not None:
            from pytest_fxbucket.capture.traced import take_step

            factory = import_callable(plan.graph.factory, f"{plan.path}: [graph] factory")
            with blamed(lambda: f"[graph] factory {plan.graph.factory}"):  # type: ignore[union-attr]
                given = factory()
            return take_step(given, plan, world, rank)
        assert plan.model is not None
        return _capture_model(plan, plan.model, world, rank)


def _capture_model(plan: Plan, model: Model, world: int, rank: int) -> StepGraph:
    import torch

    from pytest_fxbucket.capture.shard import ShardPolicy
    from pytest_fxbucket.capture.step import capture_step
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
    from pytest_fxbucket.compat.groups import group_name

    factory, batch, loss = import_model(model, str(plan.path))
    torch.manual_seed(plan.run.seed)
    fake_mode = FakeTensorMode()
    with fake_mode, blamed(lambda: f"[model] factory {model.factory}"):
        built = factory(**model.args)
    if not isinstance(built, torch.nn.Module):
        raise CaptureError(f"[model] factory {model.factory} gave a {type(built).__name__}, expected a torch.nn.Module")
    with blamed(lambda: f"[model] batch {model.batch}"):
        data = batch(rank, 0)
    if not isinstance(data, (tuple, list, dict)):
        raise CaptureError(f"[model] batch {model.batch} gave a {type(data).__name__}, expected a tuple or a dict of inputs")
    policy = ShardPolicy(
        world,
        group_name(torch.distributed.group.WORLD),
        dtype_named(plan.parallel.param_dtype),
        dtype_named(plan.parallel.reduce_dtype),
    )
    reshard = plan.parallel.reshard_after_forward
    return capture_step(built, data, loss, policy, fake_mode, rank=rank, reshard_after_forward=reshard)


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


def dtype_named(name: str | None) -> torch.dtype | None:
    """``torch.<name>``; None for None. Raises :class:`PlanError` if torch has no such dtype."""
    import torch

    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"torch has no dtype {name!r}")
    return dtype
