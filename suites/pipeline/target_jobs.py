"""Jobs for ranks: one step of a model cut into stages, by a target."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pytest_fxbucket.pipeline import Stages, split_stages
from pytest_fxbucket.pipeline.targets import Setup, sum_tied_gradients, target_of
from suites.pipeline import stand_ins
from suites.pipeline.running import bits, summed
from suites.pipeline.stage_models import SPLITS


def parts_of(
    name: str, cuts: Any, microbatches: int, change: Callable[[Any], None] | None = None
) -> tuple[Any, Any, list[Any]]:
    """A model, its stages, and the arguments of each microbatch."""
    torch.manual_seed(11)
    model = SPLITS[name].build()
    if change is not None:
        change(model)
    model.train()
    batches = [SPLITS[name].batch() for _ in range(microbatches)]
    return model, split_stages(model, cuts, batches[0]), batches


def flat(stages: Stages, batch: Any) -> tuple[Tensor, ...]:
    return stages.batch(**batch) if isinstance(batch, dict) else stages.batch(*batch)


def loss(output: Any, target: Any) -> Tensor:
    return summed(output)


def run(
    rank: int, world: int, payload: tuple[str, Any, str, str, int], change: Callable[[Any], None] | None = None
) -> dict[str, Any]:
    """Bits of the losses, and of the gradients of the rank's stages."""
    name, cuts, target, schedule, microbatches = payload
    model, stages, batches = parts_of(name, cuts, microbatches, change)
    torch.manual_seed(5)
    if target == "deepspeed":
        stand_ins.deepspeed_pipe()
    setup = Setup(rank, world, microbatches, schedule, loss, config=SimpleNamespace(pipeline_dtype=torch.float32))
    engine = target_of(target).engine(stages, setup)
    losses = STEPS[target](engine, stages, batches)
    own = {fqn for stage in stages if owner(schedule, stage.summary.index, world) == rank for fqn in stage.summary.parameters}
    apart = {tie.fqn: model.get_parameter(tie.fqn).grad for tie in stages.ties if tie.fqn in own}
    apart = {fqn: None if grad is None else grad.clone() for fqn, grad in apart.items()}
    if target != "deepspeed":
        sum_tied_gradients(stages, setup)
    grads = {fqn: bits(parameter.grad) for fqn, parameter in model.named_parameters() if fqn in own}
    return {"losses": [bits(one) for one in losses], "grads": grads, "apart": apart}


def owner(schedule: str, index: int, world: int) -> int:
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return index if index < world else 2 * world - 1 - index
    return index % world


def _torch(engine: Any, stages: Stages, batches: list[Any]) -> list[Tensor]:
    whole = [torch.cat(parts) for parts in zip(*(flat(stages, batch) for batch in batches), strict=True)]
    losses: list[Tensor] = []
    own = engine._stages if hasattr(engine, "_stages") else [engine._stage]
    first, last = any(stage.is_first for stage in own), any(stage.is_last for stage in own)
    engine.step(
        *(whole if first else ()),
        target=torch.zeros(len(batches)) if last else None,
        losses=losses if last else None,
        return_outputs=False,
    )
    return [one.detach() for one in losses]


def _deepspeed(engine: Any, stages: Stages, batches: list[Any]) -> list[Tensor]:
    return stand_ins.deepspeed_train_batch(engine, ((flat(stages, batch), torch.zeros(1)) for batch in batches), len(batches))


def _megatron(engine: Any, stages: Stages, batches: list[Any]) -> list[Tensor]:
    data = zip((flat(stages, batch) for batch in batches), repeat(None))
    return stand_ins.megatron_forward_backward(**engine.arguments(data))


STEPS = {"torch": _torch, "deepspeed": _deepspeed, "megatron": _megatron}


def hooked(rank: int, world: int, payload: tuple[str, Any, str, str, int]) -> dict[str, Any]:
    """What hooks around the model's forward are called with on this rank."""
    calls: dict[str, Any] = {"before": [], "behind": []}

    def before(module: Any, args: Any) -> None:
        calls["before"].append(bits(args))

    def behind(module: Any, args: Any, output: Any) -> None:
        calls["behind"].append((bits(args), bits(output)))

    def register(model: Any) -> None:
        model.register_forward_pre_hook(before)
        model.register_forward_hook(behind)

    run(rank, world, payload, register)
    return calls
