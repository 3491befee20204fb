"""Runs in the ranks: a step of one's own that capture_step parts, beside the same one that its user has parted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import capture_step
from suites.train_step.sharded_trainers import net
from suites.train_step.step_twins import Optimizers, Run, differing

Models = dict[str, nn.Module]


def step_of(models: Models, optimizers: Optimizers, clip: bool) -> Callable[..., torch.Tensor]:
    """Two modules, one behind the other; gradients of both are clipped together."""

    def step(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = mse_loss(models["head"](models["body"](x)), y) * scale
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_([one for model in models.values() for one in model.parameters()], 0.3)
        optimizers[0].step()
        return loss.detach()

    return step


def models_of() -> Models:
    whole = net()
    return {"body": nn.Sequential(*whole[:3]), "head": nn.Sequential(whole[3])}


def adam(models: Models) -> torch.optim.Optimizer:
    """A group for each module, of which the head's learns slower."""
    groups = [
        {"params": list(model.parameters()), "lr": rate} for model, rate in zip(models.values(), (0.1, 0.02), strict=True)
    ]
    return torch.optim.Adam(groups)


def shard(models: Models) -> None:
    for model in models.values():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def copies(models: Models) -> None:
    for model in models.values():
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))


def ddp(models: Models) -> None:
    for name, model in models.items():
        models[name] = DistributedDataParallel(model)


def over_tp(models: Models) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    parallelize_module(models["body"], mesh["tp"], plan)
    for model in models.values():
        fully_shard(model, mesh=mesh["dp"])


def by_callable(model: nn.Module, mesh: Any) -> None:
    for module in model.children():
        fully_shard(module, mesh=mesh)


def wrapped(models: Models) -> None:
    """Under names that its modules did not have before."""
    under_other_names(nn.ModuleDict(models), init_device_mesh("cpu", (dist.get_world_size(),)))


def under_other_names(model: nn.Module, mesh: Any) -> None:
    for module in model.children():
        for name, child in list(module.named_children()):
            setattr(module, name, checkpoint_wrapper(child))
            fully_shard(getattr(module, name), mesh=mesh)


WAYS: dict[str, tuple[Callable[[Models], None], Any, tuple[int, ...] | None, tuple[str, ...]]] = {
    "a callable": (shard, by_callable, (2,), ("dp",)),
    "wrappers": (wrapped, under_other_names, (2,), ("dp",)),
    "hybrid_shard": (copies, "hybrid_shard", (2, 2), ("copies", "shards")),
    "replicate": (ddp, "replicate", None, ()),
    "over tp": (over_tp, [{"body.*.up": "colwise", "body.*.down": "rowwise"}, "fully_shard"], (2, 2), ("dp", "tp")),
}
"""How its user parts it, ``parallel``, and the mesh."""


def train(rank: int, world: int, payload: dict[str, Any]) -> int:
    """Steps that are alike by every bit, or it fails; how many optimizer states are DTensors."""
    by_hand, parallel, shape, names = WAYS[payload["name"]]
    clip = payload["name"] != "over tp"  # torch's own raises over two meshes
    mine, theirs = models_of(), models_of()
    by_hand(theirs)
    optimizers = [adam(one) for one in (mine, theirs)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if shape else None
    captured = capture_step(
        step_of(mine, [optimizers[0]], clip),
        model=mine,
        optimizers=optimizers[0],
        parallel=parallel,
        mesh=mesh,
        batch_dim={"scale": None, "y": -2},
    )
    eager = step_of(theirs, [optimizers[1]], clip)
    runs = [Run(nn.ModuleDict(one), [optimizer], None) for one, optimizer in zip((mine, theirs), optimizers, strict=True)]
    parts = 2 if payload["name"] == "over tp" else world
    place = rank * parts // world
    for number in range(2):
        draw = torch.Generator().manual_seed(number)
        x, y, scale = torch.randn(8, 8, generator=draw), torch.randn(8, 4, generator=draw), torch.tensor(1.5)
        losses = captured(x, y, scale), eager(x.chunk(parts)[place], y.chunk(parts)[place], scale)
        assert torch.equal(*losses), losses
        assert differing(*runs) == [], differing(*runs)
    assert captured.traces == 1
    return sum(type(value).__name__ == "DTensor" for state in optimizers[0].state.values() for value in state.values())


def begun(rank: int, world: int, payload: None) -> int:
    """State that an optimizer has already is parted with its parameters, or it fails; how many tensors of state."""
    models = models_of()
    optimizer = adam(models)
    step_of(models, [optimizer], True)(torch.ones(8, 8), torch.zeros(8, 4), torch.tensor(1.0))
    before = [dict(state) for state in optimizer.state.values()]
    capture_step(print, model=models, optimizers=optimizer, parallel="fully_shard")
    after: list[dict[str, Any]] = [dict(state) for state in optimizer.state.values()]
    for was, now in zip(before, after, strict=True):
        for key, whole in was.items():
            assert torch.equal(now[key].full_tensor() if key != "step" else now[key], whole)
    return sum(len(state) for state in after)


# What is refused.


def raising(model: nn.Module, mesh: Any) -> None:
    raise ValueError("no such layer")


def renaming(model: nn.Sequential, mesh: Any) -> None:
    model[0] = checkpoint_wrapper(model[0])
    raising(model, mesh)


def removing(model: nn.Sequential, mesh: Any) -> None:
    model[0] = nn.Identity()


def first_alone(model: nn.Sequential, mesh: Any) -> None:
    fully_shard(model[0], mesh=mesh)
    raising(model, mesh)


def refusals(rank: int, world: int, payload: None) -> dict[str, str]:
    """What is said, by what was wrong."""

    def given(parallel: Any = "fully_shard", *, seed: int = 0, layers: int = 1, **options: Any) -> str:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        try:
            step = capture_step(lambda x: model(x).sum(), model=model, parallel=parallel, **options)
            return f"gave {step(torch.ones(6, 4)).item()}"
        except CaptureError as error:
            return str(error)

    def called(*args: Any, **options: Any) -> str:
        model = nn.Linear(4, 4)
        step = capture_step(lambda x: model(x).sum(), model=model, parallel="fully_shard", sync=True)
        try:
            step(*args, **options)
        except CaptureError as error:
            return str(error)
        return ""

    def half_way() -> str:
        """What is said when a second way fails; the optimizer has the model's own parameters then."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model.parameters())
        try:
            capture_step(print, model=model, optimizers=optimizer, parallel=["fully_shard", raising])
        except CaptureError as error:
            own = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
            assert own == [id(parameter) for parameter in model.parameters()]
            return str(error)
        return ""

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return {
        "half-way": half_way(),
        "half of the first": given(first_alone, layers=2),
        "nothing yet": given(["replicate", raising]),
        "other names": given(["replicate", renaming]),
        "less": given(removing),
        "too many": called(torch.ones(4, 4), torch.ones(4, 4)),
        "unknown keyword": called(torch.ones(4, 4), y=1),
        "ranks that differ": given(seed=rank),
        "sent": given("replicate", seed=rank, sync=True, batch_dim=None),
        "a layer more": given(layers=2 if rank == 1 else 1),
        "a layer less": given("replicate", layers=1 if rank == 1 else 2, sync=True),
        "unknown": given("fsdp"),
        "mesh": given("fully_shard", mesh=mesh),
        "no mesh": given("hybrid_shard"),
        "no parallel": given(None, mesh=mesh),
        "not divided": given(),
        "no argument": given(batch_dim={"y": 0}),
        "module": given({"1": "colwise"}),
        "style": given({"0": "diagonal"}),
        "other model": given(lambda model, mesh: nn.Linear(1, 1)),
        "no DeviceMesh": given(mesh=[4]),
    }


def sent_into_views(rank: int, world: int, payload: None) -> bool:
    """Whether a rank gets the values of rank 0 in a parameter that lies in part of a larger tensor, and nothing beside it."""
    torch.manual_seed(rank)
    base, model = torch.randn(4, 6), nn.Linear(3, 4)
    beside = base[:, 3:].clone()
    model.weight = nn.Parameter(base[:, :3])
    capture_step(lambda x: model(x).detach(), model=model, parallel="replicate", sync=True)
    torch.manual_seed(0)
    return torch.equal(model.weight.detach(), torch.randn(4, 6)[:, :3]) and torch.equal(base[:, 3:], beside)


def under_two_names(rank: int, world: int, payload: None) -> bool:
    """Whether a module that DDP wraps may be given beside it."""
    torch.manual_seed(0)
    own = nn.Linear(2, 1)
    wrapped_too = DistributedDataParallel(own)

    def step(x: torch.Tensor) -> torch.Tensor:
        wrapped_too.zero_grad()
        wrapped_too(x).sum().backward()
        return own.weight.grad.clone()

    x = torch.full((1, 2), float(rank + 1))
    return torch.equal(step(x), capture_step(step, model={"own": own, "ddp": wrapped_too})(x))
