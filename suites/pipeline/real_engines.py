"""Jobs for ranks with the real DeepSpeed or Megatron, on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from pytest_fxbucket.pipeline.targets import Setup, target_of
from suites.pipeline.running import bits
from suites.pipeline.target_jobs import flat, loss, parts_of


def deepspeed(rank: int, world: int, payload: tuple[str, Any, int]) -> dict[str, Any]:
    """A step of DeepSpeed's own engine; it divides losses by the number of microbatches."""
    import deepspeed as package
    from deepspeed.comm import torch as deepspeed_torch

    deepspeed_torch.build_shm_op = lambda: None  # else it compiles C++ for a quicker all-reduce
    name, cuts, microbatches = payload
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
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    engine, *_ = package.initialize(model=module, optimizer=Seen(module.parameters(), lr=0.1), config=config)
    engine.train_batch((flat(stages, batch), torch.zeros(1)) for batch in batches)
    losses = [bits(one) for one in engine.fwd_outputs] if engine.is_last_stage() else []
    return {"losses": losses, "grads": seen, "apart": {}}
