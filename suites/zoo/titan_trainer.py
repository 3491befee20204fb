"""torchtitan's own trainer of Llama 3 as the step that ``eager`` holds a plan against: its parallelize function, its clipping.

``python -m suites.zoo.titan_both`` prints what became of the plan's items, a line each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from suites.zoo.titan import SHELF, next_token_loss

if TYPE_CHECKING:
    from pytest_fxbucket.ranks.pools import Pools

ROOT = Path(__file__).resolve().parents[2]
PLAN = """
[model]
factory = "suites.zoo.titan:SHELF.llama3.build"
batch = "suites.zoo.titan:SHELF.llama3.batch"
loss = "suites.zoo.titan:SHELF.llama3.loss"
[parallel]
{parallel}
param_dtype = "{dtype}"
reduce_dtype = "float32"
[step]
clip_norm = 0.25
checkpoint = ["layers.*"]
[optimizer]
factory = "torch.optim:AdamW"
args = {{ lr = 0.001 }}
[bucket]
plan = ["tok_embeddings", "layers.*", "norm+output"]
[run]
steps = 2
reduce = "{reduce}"
[eager]
factory = "suites.zoo.titan_trainer:Trainer"
args = {{ dtype = "{dtype}" }}
"""
CASES = {
    "round a ring": dict(parallel="dp_shard = 4", dtype="float32", reduce="ring"),
    "two copies of two, in bfloat16": dict(
        parallel='mode = "hybrid_shard"\ndp_replicate = 2\ndp_shard = 2', dtype="bfloat16", reduce="rank_order"
    ),
}
"""Sums of a few bfloat16 numbers have the same bits in float32 in any order, so rings are in float32."""


class Trainer:
    """One job: torchtitan adds gradients and divides losses by what all ranks have, where FSDP2 would average gradients."""

    def __init__(self, mesh: Mapping[str, int], *, dtype: str) -> None:
        from torchtitan.config import JobConfig  # type: ignore[import-not-found]  # of the zoo's libraries
        from torchtitan.distributed import ParallelDims, parallel_dims  # type: ignore[import-not-found]
        from torchtitan.models.llama3.infra.parallelize import parallelize_llama  # type: ignore[import-not-found]

        parallel_dims.device_type = "cpu"  # it takes every machine without a GPU for one with CUDA
        self.ranks = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
        dims: dict[str, Any] = dict(dp_replicate=mesh.get("dp_replicate", 1), dp_shard=mesh.get("dp_shard", 1))
        parallel = ParallelDims(**dims, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=self.ranks)
        config = JobConfig()
        config.training.mixed_precision_param, config.training.mixed_precision_reduce = dtype, "float32"
        config.training.seq_len = 16
        config.activation_checkpoint.mode = "full"
        self.model = parallelize_llama(SHELF.llama3.build(), parallel, config)
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.001)]

    def backward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean of this rank's tokens, each of which counts as one of all ranks'."""
        loss = next_token_loss(self.model(batch["tokens"]), batch)
        (loss / self.ranks).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        """Clip as torchtitan does, step."""
        from torchtitan.distributed.utils import clip_grad_norm_  # type: ignore[import-not-found]

        clip_grad_norm_(list(self.model.parameters()), 0.25, foreach=True)
        self.optimizers[0].step()


def lines(pools: Pools) -> Iterator[str]:
    """A line for each case: its name, and what its item eager came to."""
    from pytest_fxbucket.plan import parse_plans
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.settings import RunSettings
    from suites.zoo.libraries import provide

    provide()
    for name, case in CASES.items():
        (plan,) = parse_plans(PLAN.format(**case), ROOT / "titan.toml")
        with tempfile.TemporaryDirectory() as folder:
            settings = RunSettings(ROOT, Path(folder) / "golden", Path(folder), backend="local")
            verdict = PlanRun(plan, settings, pools).check("eager")
        yield f"{name}: {verdict.outcome}: {[*verdict.lines, verdict.summary][0]}"
