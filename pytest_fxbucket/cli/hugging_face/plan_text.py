"""The plan that ``fxbucket init --hf`` writes: the real size for audit, golden and collectives, a row for what ranks run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_fxbucket.cli.first_entries import Draft
from pytest_fxbucket.plan.toml_text import to_toml

DP_SHARD, RUN_SHARD = 8, 2


@dataclass(frozen=True)
class HfPlan:
    """What the plan says of one model."""

    module: str
    """That has factory, batches and loss."""
    model: str
    """Its class."""
    bucket: Draft
    ties: Mapping[str, str]
    """Names of tied parameters, with those that they have in the plan."""
    may_be_idle: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    param_dtype: str | None = None
    has_memory: bool = False
    """Whether a decoder reads what an encoder made, in each layer."""


def plan_text(plan: HfPlan) -> str:
    """The plan file."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: HfPlan) -> Iterator[str]:
    yield f"# {plan.model}, by fxbucket init --hf: this file and {plan.module}.py are yours to change."
    yield "[model]"
    for key in ("factory", "batch", "loss"):
        yield f'{key} = "{plan.module}:{"build" if key == "factory" else key}"'
    if plan.may_be_idle:
        yield "# Their gradients may be zero in every step: experts without tokens, or by the model's design."
        yield f"may_be_idle = {to_toml(list(plan.may_be_idle))}"
    if plan.overridden:
        yield from ("", "[override]  # cannot be traced, since it looks at values: called as it is when the step runs")
        yield f"module = {to_toml(list(plan.overridden))}"
    yield from ("", "[parallel]", f"dp_shard = {DP_SHARD}  # ranks of the real job")
    if plan.param_dtype:
        yield f'param_dtype = "{plan.param_dtype}"  # as the configuration has it'
        yield 'reduce_dtype = "float32"'
    yield from ("", *plan.bucket.lines(plan.ties))
    yield from ("", "[checks]  # the real size is traced, and never in memory", "bitwise = false", "eager = false")
    yield from ("", "[[matrix]]", 'id = "small"  # what ranks run', "model.args = { small = true }")
    yield f'model.batch = "{plan.module}:small_batch"'
    yield f"run.world = {{ dp_shard = {RUN_SHARD} }}"
    if plan.has_memory:
        yield "# eager is off: where layers read an encoder's memory, FSDP2 adds its gradients in another order, by design."
    eager = "false" if plan.has_memory else "true"
    yield f"checks = {{ audit = false, golden = false, collectives = false, same = false, bitwise = true, eager = {eager} }}"
