"""The plan that ``fxbucket init --torchtitan`` writes: what torchtitan's defaults do, in the words of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_fxbucket.cli.first_entries import Draft
from pytest_fxbucket.cli.torchtitan.registry import Chosen
from pytest_fxbucket.plan.toml_text import to_toml

DP_SHARD, RUN_SHARD = 8, 2
_RANKS = "audit = false, golden = false, collectives = false, same = false, bitwise = true"


@dataclass(frozen=True)
class TitanPlan:
    """What the plan says of one model."""

    module: str
    """That has factory, batches, loss and trainer."""
    chosen: Chosen
    job: Any
    """torchtitan's configuration."""
    bucket: Draft
    ties: Mapping[str, str]
    """Names of tied parameters, with those that they have in the plan."""
    checkpoint: Mapping[str, tuple[str, ...]]
    """Of each flavor: layers whose forward is computed again in backward."""
    overridden: tuple[str, ...] = ()

    @property
    def has_trainer(self) -> bool:
        """Whether torchtitan's own step keeps to the plan's model: where parameters are tied, its units part them."""
        return not self.ties


def plan_text(plan: TitanPlan) -> str:
    """The plan file."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: TitanPlan) -> Iterator[str]:
    chosen, training = plan.chosen, plan.job.training
    yield f"# {chosen.name} of torchtitan, {chosen.flavor}: this file and {plan.module}.py are yours to change."
    yield "[model]"
    for key in ("factory", "batch", "loss"):
        yield f'{key} = "{plan.module}:{"build" if key == "factory" else key}"'
    if plan.overridden:
        yield from ("", "[override]  # cannot be traced, since it looks at values: called as it is when the step runs")
        yield f"module = {to_toml(list(plan.overridden))}"
    yield from ("", "[parallel]", f"dp_shard = {DP_SHARD}  # ranks of the real job")
    yield f'param_dtype = "{training.mixed_precision_param}"'
    yield f'reduce_dtype = "{training.mixed_precision_reduce}"'
    yield from ("", "[step]", f"clip_norm = {float(training.max_norm)}")
    if again := plan.checkpoint[chosen.flavor]:
        yield f"checkpoint = {to_toml(list(again))}  # as {_mode(plan.job.activation_checkpoint)} does"
    yield from ("", *_optimizer(plan.job.optimizer), "", *plan.bucket.lines(plan.ties), "")
    if plan.has_trainer:
        yield from (
            "[eager]  # torchtitan's own parallelize function, optimizers and clipping",
            f'factory = "{plan.module}:Trainer"',
        )
    else:
        yield "# Item eager is beside torch's own step: torchtitan's units shard the tied parameter twice, and so part it."
    yield ""
    if chosen.small == chosen.flavor:
        yield from ("[run]", f"world = {{ dp_shard = {RUN_SHARD} }}")
        return
    yield from ("[checks]  # this flavor is traced, and never in memory", "bitwise = false", "eager = false", "")
    yield from ("[[matrix]]", 'id = "small"  # what ranks run', f'model.args = {{ flavor = "{chosen.small}" }}')
    yield f'model.batch = "{plan.module}:small_batch"'
    yield f"step.checkpoint = {to_toml(list(plan.checkpoint[chosen.small]))}"
    yield f"run.world = {{ dp_shard = {RUN_SHARD} }}"
    yield f"checks = {{ {_RANKS}, eager = true }}"


def _mode(again: Any) -> str:
    return f"{again.mode} {again.selective_ac_option}" if again.mode == "selective" else str(again.mode)


def _optimizer(given: Any) -> Iterator[str]:
    yield "[optimizer]"
    yield f'factory = "torch.optim:{given.name}"'
    numbers = f"lr = {given.lr}, betas = [{given.beta1}, {given.beta2}], eps = {given.eps}, weight_decay = {given.weight_decay}"
    how = {"fused": ", fused = true", "foreach": ", foreach = true"}.get(given.implementation, "")
    yield f"args = {{ {numbers}{how} }}"
