"""Runs in the ranks: trainers as people write them, under torch's own parallelism, by eager and captured as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pytest_fxbucket.capture import StepGraph
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.transforms.next_iteration import next_iteration
from suites.train_step.step_twins import Optimizers, Step, Twins, adamw, differing


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net(hidden: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(hidden), Block(hidden), nn.Linear(8, 4))


def fsdp(
    hidden: int = 16,
    shape: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
    divisor: float | None = None,
    reduced: torch.dtype | None = torch.float32,
) -> nn.Module:
    model: Any
    shape = shape or (dist.get_world_size(),)
    model, mesh = net(hidden), init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    # what a block gives in bfloat16 rounds where it computes in float16; float64 shows in the loss
    for module, given in ((model[1], torch.bfloat16), (model[2], None), (model, torch.float64)):
        policy = MixedPrecisionPolicy(dtype, reduced, given) if dtype else MixedPrecisionPolicy()
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if divisor is not None:
            module.set_gradient_divide_factor(divisor)
    return model


def over_tp(data: int, sequence: bool = False, dtype: torch.dtype | None = None) -> nn.Module:
    """Blocks parted over tp, with ``sequence`` their norms by rows; with ``data`` above 1 under FSDP2, too."""
    model, mesh = net(), init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=("dp", "tp"))
    rows = Shard(0) if sequence else Replicate()
    styles: Any = {"up": ColwiseParallel(input_layouts=rows), "down": RowwiseParallel(output_layouts=rows)}
    if sequence:
        styles["norm"] = SequenceParallel(sequence_dim=0)  # its weight's gradient is a sum over ranks
    for block in (model[1], model[2]):
        parallelize_module(block, mesh["tp"], styles)
    policy = MixedPrecisionPolicy(dtype, torch.float32) if dtype else MixedPrecisionPolicy()
    for module in (model[1], model[2], model) if data > 1 else ():
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return model


def hooked(model: Any) -> nn.Module:
    """With hooks that take the sign away: of gradients, which FSDP2 does not run, and behind them, which it does."""

    def behind(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.abs_()

    for parameter in model[1].parameters():
        parameter.register_hook(torch.abs)
    for parameter in model[2].parameters():
        parameter.register_post_accumulate_grad_hook(behind)
    made: nn.Module = model
    return made


def ddp(**options: Any) -> nn.Module:
    return DistributedDataParallel(net(), **options)


def ddp_but_for_one() -> nn.Module:
    model = net()
    leave = next(name for name, _ in model.named_parameters())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [leave])
    return DistributedDataParallel(model)


def trainer(clip: bool = True, microbatches: int = 1, synced: bool = True, saved: bool = True) -> Any:
    """A step with ``microbatches``, of which only the last reduces gradients unless ``synced``; without ``saved`` what forward
    keeps is computed again."""

    def make(model: Any, optimizers: Optimizers) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizers[0].zero_grad()
            total = torch.zeros(())
            for number, (part, wanted) in enumerate(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)):
                is_reduced = synced or number == microbatches - 1
                later = nullcontext()
                if isinstance(model, DistributedDataParallel):
                    later = nullcontext() if is_reduced else model.no_sync()
                elif not synced:
                    model.set_requires_gradient_sync(is_reduced)
                with later:
                    out = model(part) if saved else checkpoint(model, part, use_reentrant=False)
                    loss = mse_loss(out, wanted.to(out.dtype))  # torch 2.11 goes not backward from two dtypes
                    loss.backward()
                total += loss.detach()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizers[0].step()
            return total

        return step

    return make


def of_three_views(model: nn.Module, optimizers: Optimizers) -> Step:
    """Goes forward twice before it goes backward, then once more each, as a critic's step does."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = model(x).square().mean() + (model(-x) - 1).square().mean()
        loss.backward()
        model(2 * x).mean().backward()
        optimizers[0].step()
        return loss.detach()

    return step


def of_unsynced_forwards(model: Any, optimizers: Optimizers) -> Step:
    """Forwards without gradients, or without sync, stand between those that are gone back through."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        out = model(x)
        with torch.no_grad(), model.no_sync():
            wanted = model(-x)
        loss = mse_loss(out, wanted)
        loss.backward()  # reduces
        with model.no_sync():
            out = model(2 * x)
        with torch.no_grad():
            wanted = model(x)
        mse_loss(out, wanted).backward()  # does not
        model(x).mean().backward()
        optimizers[0].step()
        return loss.detach()

    return step


class TwoHeads(nn.Module):
    """Of which each call uses one, behind a block that reads its input thrice, and others behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        out: torch.Tensor = self.heads[head](x)
        return out


def two_heads(under: str) -> nn.Module:
    model: Any = TwoHeads()
    if under == "DDP":
        return DistributedDataParallel(model, find_unused_parameters=True)
    for unit in (model.attention, *model.heads, model):
        fully_shard(unit)
    return model  # type: ignore[no-any-return]  # fully_shard gives another class to it


def of_a_head_each(model: Any, optimizers: Optimizers) -> Step:
    """A head for each microbatch, and each second one reduces what both have made; the last leaves out what is reduced."""

    def backward(x: torch.Tensor, y: torch.Tensor, head: int, reduces: bool) -> None:
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = reduces
        else:
            model.set_requires_gradient_sync(reduces)
        mse_loss(model(x, head), y).backward()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        backward(x, y, 0, False)
        backward(2 * x, y, 1, True)
        backward(3 * x, y, 1, False)
        backward(-x, y, 0, True)
        backward(x, -y, 1, True)
        optimizers[0].step()
        return x.sum()

    return step


def updated_behind(model: nn.Module, optimizers: Optimizers) -> Step:
    """Each parameter is updated as soon as its gradient is reduced, which then goes."""

    def behind(parameter: torch.Tensor) -> None:
        optimizers[0].step()  # of those that have a gradient
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(behind)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def bucketed(step: StepGraph, state: dict[str, torch.Tensor]) -> StepGraph:
    manual_overlap_bucketing(step.graphs["joint"], ["1", "2"])
    return step


# Copies of shards that are averaged, and shards over tp, are in parallel_jobs.
WAYS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[Any, ...]]] = {
    "rows that ranks do not divide, bucketed": (lambda: fsdp(7), trainer(), (bucketed,)),
    "bfloat16, reduced as torch likes": (lambda: fsdp(dtype=torch.bfloat16, reduced=None), trainer(), ()),
    "sums": (lambda: fsdp(divisor=1.0), trainer(), ()),
    "sums of copies": (lambda: fsdp(shape=(2, 2), divisor=2.0), trainer(), ()),
    "float16": (lambda: fsdp(dtype=torch.float16, reduced=torch.float16), trainer(), ()),
    "computed again": (fsdp, trainer(saved=False), ()),
    "two microbatches, bucketed": (fsdp, trainer(microbatches=2), (bucketed,)),
    "two microbatches, the last reduces": (fsdp, trainer(microbatches=2, synced=False), ()),
    "hooks, two microbatches": (lambda: hooked(fsdp()), trainer(microbatches=2), ()),
    "hooks, two microbatches, the last reduces": (lambda: hooked(fsdp()), trainer(microbatches=2, synced=False), ()),
    "rows that ranks do not divide, two microbatches, bucketed": (
        lambda: fsdp(7),
        trainer(clip=False, microbatches=2),
        (bucketed,),
    ),
    "three views of a batch": (fsdp, of_three_views, ()),
    "three views of a batch in bfloat16": (lambda: fsdp(dtype=torch.bfloat16), of_three_views, ()),
    "DDP, forwards without gradients and without sync": (ddp, of_unsynced_forwards, ()),
    "DDP, three views of a batch": (ddp, of_three_views, ()),
    "a head for each microbatch": (lambda: two_heads("fully_shard"), of_a_head_each, ()),
    "DDP, a head for each microbatch": (lambda: two_heads("DDP"), of_a_head_each, ()),
    "updates behind each gradient, bucketed": (fsdp, updated_behind, (bucketed,)),
    "tp": (lambda: hooked(over_tp(1)), trainer(clip=False), ()),
    "bfloat16 over tp, norms by rows": (
        lambda: over_tp(2, sequence=True, dtype=torch.bfloat16),
        trainer(clip=False),
        (),
    ),
    "norms by rows, two microbatches, the last reduces": (
        lambda: over_tp(2, sequence=True),
        trainer(clip=False, microbatches=2, synced=False),
        (),
    ),
    "DDP that leaves a parameter alone": (ddp_but_for_one, trainer(), ()),
    "DDP, two microbatches": (ddp, trainer(microbatches=2), ()),
    "DDP, two microbatches, the last reduces": (ddp, trainer(microbatches=2, synced=False), ()),
}
FOUR = (
    "rows that ranks do not divide, bucketed",
    "sums of copies",
    "bfloat16 over tp, norms by rows",
    "norms by rows, two microbatches, the last reduces",
    "DDP, two microbatches",
)
"""What needs four ranks: sums, of which two have but one order, and meshes of two dimensions. All else is as well on two."""


def batch(rank: int, number: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Another for each rank of the batch."""
    draw = torch.Generator().manual_seed(100 * number + (0 if name == "tp" else rank))
    return torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)


def train(rank: int, world: int, payload: dict[str, Any]) -> dict[str, int]:
    """Steps of the way ``payload["name"]``, alike by every bit or it fails; launches by kind."""
    name = payload["name"]
    make_model, make_step, transforms = WAYS[name]
    twins = Twins(adamw, make_step, make_model, transforms)
    for number in range(2):
        twins.same(*batch(rank, number, name))
    assert twins.step.traces == 1
    for run in twins.each():
        with torch.no_grad():
            run.model(batch(rank, 3, name)[0])  # evaluated in between, by eager
    twins.same(*batch(rank, 4, name))
    (graph,) = (step.graphs["joint"].graph for step in twins.step.graphs)
    targets = [str(node.target) for node in graph.nodes]
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return {kind: sum(f"_c10d_functional.{kind}" in target for target in targets) for kind in kinds}


def no_sync(model: Any) -> None:
    model.require_backward_grad_sync = False  # what the block of no_sync() has it be


def on_units(method: str, *given: Any) -> Callable[[Any], None]:
    """Call ``method`` of each module under ``fully_shard``."""
    return lambda model: [getattr(module, method)(*given) for module in (model[1], model[2], model)] and None


TOLD: dict[str, tuple[Callable[[], nn.Module], tuple[Callable[[Any], None], ...]]] = {
    "fully_shard": (
        fsdp,
        (
            on_units("set_reshard_after_forward", False),
            on_units("set_force_sum_reduction_for_comms", True),
            on_units("set_gradient_divide_factor", 4.0),
        ),
    ),
    "DDP": (ddp, (no_sync,)),
}
"""What a model is told between two calls, outside the step, one after the other."""


def told(rank: int, world: int, payload: str) -> int:
    """Of a trainer that is told :data:`TOLD` between two calls, alike by every bit: how many graphs it has that differ."""
    make_model, told = TOLD[payload]
    twins = Twins(adamw, trainer(clip=False), make_model)
    twins.same(*batch(rank, 0, ""))
    for traces, tell in enumerate(told, 2):
        for run in twins.each():
            tell(run.model)
        for number in range(2):
            twins.same(*batch(rank, traces + number, ""))
        assert twins.step.traces == traces
    return len({step.graphs["joint"].code for step in twins.step.graphs})


def across(rank: int, world: int, payload: None) -> list[str]:
    """What of a trainer is not eager's when the reductions and updates of a block went into the next step each time, and the
    last finished them."""
    crossing = partial(next_iteration, entries=["1", "2"])
    twins = Twins(adamw, trainer(clip=False), lambda: fsdp(7), [bucketed, crossing])
    for number in range(4):
        given = batch(rank, number, "")
        twins.eager.step(*given)
        twins.step(*given, last_step=number == 3)
    return differing(*twins.each())


def saved(rank: int, world: int, payload: str) -> list[str]:
    """What a trainer of eager's that loads the distributed checkpoint of a captured one, in the folder ``payload``, has
    otherwise behind one step more of both."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    twins, others = (Twins(adamw, trainer(), lambda: fsdp(7)) for _ in range(2))
    for number in range(2):
        twins.step(*batch(rank, number, ""))
    given, taken = twins.captured, others.eager
    model, optimizer = get_state_dict(given.model, given.optimizers)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=payload)
    taken.step(*batch(rank, 5, ""))  # an optimizer has state to load into
    model, optimizer = get_state_dict(taken.model, taken.optimizers)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=payload)
    set_state_dict(taken.model, taken.optimizers, model_state_dict=model, optim_state_dict=optimizer)
    for step in (twins.step, taken.step):
        step(*batch(rank, 2, ""))
    return differing(given, taken)


def overridden(rank: int, world: int, payload: None) -> list[str]:
    """What of a trainer is not eager's of which a block is called, and not traced."""
    twins = Twins(adamw, trainer(), fsdp, [bucketed], {"1": "call"})
    for number in range(3):
        twins.same(*batch(rank, number, ""))
    (step,) = twins.step.graphs
    return [str(node.target) for node in step.graphs["joint"].graph.nodes if "fxbucket" in str(node.target)][:1]


# What is refused.
