"""The text of a first plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_fxbucket.cli.blocks import Draft
from pytest_fxbucket.cli.toml_text import to_toml

RANKS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """``[model]`` of a first plan, and modules that it overrides; what is None was not found beside the factory."""

    factory: str
    args: Mapping[str, object]
    batch: str | None
    loss: str | None
    inputs: tuple[str | int, ...] = ()
    overridden: tuple[str, ...] = ()

    @property
    def placeholder(self) -> str:
        """What a batch function would be called."""
        return self.factory.partition(":")[0] + ":batch"


def plan_text(source: Source, bucket: Draft) -> str:
    """The plan file."""
    return "\n".join(_lines(source, bucket)) + "\n"


def _lines(source: Source, bucket: Draft) -> Iterator[str]:
    yield "[model]"
    yield f"factory = {to_toml(source.factory)}"
    if source.args:
        yield f"args = {to_toml(source.args)}"
    if source.batch is None:
        yield "# To be written: callable(rank, step) -> (inputs, targets), or a dict with a key for each input."
        yield "# Each rank and step needs another batch; the plan cannot run before this names one."
    yield f"batch = {to_toml(source.batch or source.placeholder)}"
    if source.inputs:
        yield f"inputs = {to_toml(list(source.inputs))}  # the model gets this of a batch, the loss the rest"
    if source.loss is None:
        yield "# loss is left out: the loss in the model's output is used, or the output itself if it is a scalar."
    else:
        yield f"loss = {to_toml(source.loss)}"
    if source.overridden:
        yield from ("", "[override]  # cannot be traced, since it looks at values: called as it is when the step runs")
        yield f"module = {to_toml(list(source.overridden))}"
    yield from ("", "[parallel]", f"dp_shard = {RANKS}  # ranks of the real job", "", "[bucket]")
    if bucket.entries:
        yield "plan = ["
        yield from (f"  {to_toml(entry)}," for entry in bucket.entries)
        yield "]"
    if bucket.unplanned != "error":
        yield f"unplanned = {to_toml(bucket.unplanned)}  # parameters in no entry share one bucket"
