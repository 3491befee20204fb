"""torchtitan's own trainer of Llama 3 and transformers' under FSDP2, captured by one line more.

``python -m suites.zoo.titan_both`` prints what became of each, a line each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pytest_fxbucket.capture import StepGraph
from pytest_fxbucket.cli.torchtitan.registry import stand_in_for_triton_kernels
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.train_step import capture_step
from suites.train_step.step_twins import Run, differing
from suites.zoo.libraries import FOLDER, provide

if TYPE_CHECKING:
    from pytest_fxbucket.ranks.pools import Pools

Trained = tuple[Run, Callable[[int, int], Any]]
"""A trainer, and its batch of a rank and a step."""
RANKS, STEPS = 2, 2


def titan() -> Trained:
    """Its parallelize function, which checkpoints and sums gradients; its clipping; in bfloat16."""
    from suites.zoo.titan import SHELF
    from suites.zoo.titan_trainer import Trainer

    torch.manual_seed(0)
    trainer = Trainer({"dp_shard": RANKS}, dtype="bfloat16")

    def step(batch: Any) -> Tensor:
        trainer.optimizers[0].zero_grad()
        loss = trainer.backward(batch)
        trainer.update()
        return loss

    return Run(trainer.model, list(trainer.optimizers), step), SHELF.llama3.batch


def hf_llama() -> Trained:
    """Units of layers in bfloat16, two microbatches, clipping, warm-up; rows of the vocabulary that ranks do not divide."""
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]  # of the zoo's libraries

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(vocab_size=101, attn_implementation="eager", use_cache=False, **sizes)
    model: nn.Module = LlamaForCausalLM(config)
    mesh, policy = init_device_mesh("cpu", (RANKS,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:  # type: ignore[union-attr]  # of the zoo's libraries
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 3))

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in tokens.chunk(2):
            loss = model(input_ids=part, labels=part).loss / 2
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return total, norm

    def batch(rank: int, number: int) -> Tensor:
        return torch.randint(0, 101, (4, 12), generator=torch.Generator().manual_seed(10 * number + rank))

    return Run(model, [optimizer], step), batch


CASES: dict[str, tuple[Callable[[], Trained], list[Any]]] = {
    "torchtitan": (titan, ["tok_embeddings", "layers.*", ["norm", "output"]]),
    "transformers": (hf_llama, ["model.embed_tokens", "model.layers.*", ["model.norm", "lm_head"]]),
}
"""The trainer, and the plan that buckets it."""


def train(rank: int, world: int, payload: dict[str, Any]) -> list[int]:
    """Runs in the ranks: launches of the captured trainer, as it is and bucketed; every bit is eager's, or it fails."""
    provide()
    stand_in_for_triton_kernels()
    make, plan = CASES[payload["name"]]
    found = []

    def bucketed(step: StepGraph, state: dict[str, Tensor]) -> StepGraph:
        found.append(_launches(step))
        manual_overlap_bucketing(step.graphs["joint"], plan)
        found.append(_launches(step))
        return step

    (eager, batch), (given, _) = make(), make()
    captured = capture_step(given.step, model=given.model, optimizers=given.optimizers, transforms=[bucketed])
    for number in range(STEPS):
        ours, theirs = captured(batch(rank, number)), eager.step(batch(rank, number))
        assert str(ours) == str(theirs)
        assert differing(eager, given) == []
    return found


def _launches(step: StepGraph) -> int:
    names = (str(node.target) for node in step.graphs["joint"].graph.nodes)
    return sum("_c10d_functional" in name and "wait" not in name for name in names)


def lines(pools: Pools) -> Iterator[str]:
    """A line for each case."""
    provide()
    root = str(FOLDER.parents[1])
    for name in CASES:
        every = pools.get(RANKS).run(
            "suites.zoo.titan_captured:train", [{"name": name}] * RANKS, timeout_s=300, paths=[root, str(FOLDER)]
        )
        assert every == [every[0]] * RANKS
        yield f"{name}: {STEPS} steps as eager's; {every[0][0]} launches, bucketed {every[0][1]}"
