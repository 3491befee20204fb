"""Jobs for ranks with the real DeepSpeed or Megatron, on a CPU."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch

from pytest_fxbucket.pipeline.targets import Setup, target_of
from suites.pipeline import stand_ins
from suites.pipeline.running import bits
from suites.pipeline.target_jobs import flat, loss, parts_of


def deepspeed(rank: int, world: int, payload: tuple[str, Any, int]) -> dict[str, Any]:
    """A step of DeepSpeed's own engine; it divides losses by the number of microbatches."""
    import deepspeed as package

    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would compile C++
    name, cuts, microbatches = payload
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    package.init_distributed(dist_backend="gloo", verbose=False)
    model, stages, batches = parts_of(name, cuts, microbatches)
    module = target_of("deepspeed").engine(stages, Setup(rank, world, microbatches, loss=loss))
    seen: dict[str, Any] = {}
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}

    class Seen(torch.optim.SGD):
        """Keeps the gradients that the engine would update with."""

        def step(self, closure: Any = None) -> Any:
            seen.update({names[id(p)]: bits(p.grad) for group in self.param_groups for p in group["params"]})
            return super().step(closure)

    each = len(flat(stages, batches[0])[0])
    config = {
        "train_micro_batch_size_per_gpu": each,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    engine, *_ = package.initialize(model=module, optimizer=Seen(module.parameters(), lr=0.1), config=config)
    engine.train_batch((flat(stages, batch), torch.zeros(1)) for batch in batches)
    losses = [bits(one) for one in engine.fwd_outputs] if engine.is_last_stage() else []
    return {"losses": losses, "grads": seen, "apart": {}}


def megatron(rank: int, world: int, payload: tuple[str, Any, int]) -> dict[str, Any]:
    """Megatron's own forward and backward steps, in the stand-in's order; its schedules want CUDA."""
    from megatron.core import ModelParallelConfig
    from megatron.core.pipeline_parallel import schedules

    name, cuts, microbatches = payload
    config = ModelParallelConfig(pipeline_dtype=torch.float32, pipeline_model_parallel_size=world)
    model, stages, batches = parts_of(name, cuts, microbatches)
    engine = target_of("megatron").engine(stages, Setup(rank, world, microbatches, loss=loss, config=config))

    def forward(function: Any, data: Any, chunk: Any, count: int, given: Any, losses: list[Any], is_last: bool) -> Any:
        output, _ = schedules.forward_step(
            function, data, chunk, count, given, losses, config, cp_group_size=1, is_last_stage=is_last
        )
        return output

    def backward(given: Any, output: Any, grad: Any) -> Any:
        return schedules.backward_step(given, output, grad, None, config)

    data = ((flat(stages, batch), None) for batch in batches)
    losses = stand_ins.megatron_forward_backward(**engine.arguments(data), forward_step=forward, backward_step=backward)
    own = set(stages[rank].summary.parameters)
    grads = {fqn: bits(parameter.grad) for fqn, parameter in model.named_parameters() if fqn in own}
    return {"losses": [bits(one["loss"]) for one in losses], "grads": grads, "apart": {}}
