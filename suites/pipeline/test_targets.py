"""A step of stages on gloo ranks, by each target: losses and gradients are the whole model's, bit for bit."""

from __future__ import annotations

import sys
from functools import reduce
from operator import add
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.errors import PlanError, StageError
from pytest_fxbucket.pipeline import Crossing, Stages, Table, split_stages, table_of
from pytest_fxbucket.pipeline.schedules import leaves
from pytest_fxbucket.pipeline.targets import Setup, target_of
from pytest_fxbucket.pipeline.targets.registry import loss_of
from pytest_fxbucket.pipeline.targets.torch_pipelining import _alone, _sent, _traced
from pytest_fxbucket.ranks.pools import Pools
from suites.pipeline.running import bits, summed
from suites.pipeline.target_jobs import parts_of

JOB = "suites.pipeline.target_jobs:run"
THREE = {
    "Nested": ["layers.0", "layers.1"],
    "Keywords": ["first.linear", "first"],
    "Parts": ["spread", "one"],
    "Skips": ["layers.1", "layers.4"],
}
TARGETS = ["torch", "deepspeed", "megatron"]
LOOPED = ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def ran(pools: Pools, world: int, *payload: Any) -> list[dict[str, Any]]:
    return pools.get(world).run(JOB, [payload] * world, timeout_s=120)  # type: ignore[return-value]


def same(found: list[dict[str, Any]], name: str, cuts: list[str], table: Table, *, mean: bool) -> None:
    """Losses are the model's, and so are gradients, summed over microbatches in the order of their stage's backwards."""
    model, stages, batches = parts_of(name, cuts, table.microbatches)
    torch.manual_seed(5)
    losses, each = [], []
    for batch in batches:
        model.zero_grad()
        loss = summed(model(**batch) if isinstance(batch, dict) else model(*batch))
        losses.append(bits(loss.detach()))
        (loss / len(batches) if mean else loss).backward()
        each.append({fqn: parameter.grad for fqn, parameter in model.named_parameters()})
    assert [one["losses"] for one in found if one["losses"]] == [losses]
    grads = {fqn: grad for one in found for fqn, grad in one["grads"].items()}
    tied = {tie.fqn for tie in stages.ties}
    compared = 0
    for stage, own in enumerate(table.owners):
        order = [a.microbatch for a in leaves(table.ranks[own]) if a.stage == stage and a.kind in ("B", "W")]
        for fqn in stages[stage].summary.parameters:
            if fqn in tied and len(batches) > 1:
                continue
            parts = [each[number][fqn] for number in order if number is not None]
            assert grads[fqn] == bits(reduce(add, parts) if parts[0] is not None else None), fqn
            compared += parts[0] is not None
    assert compared


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", THREE)
def test_three_stages(pools: Pools, name: str, target: str) -> None:
    found = ran(pools, 3, name, THREE[name], target, "1F1B", 4)
    same(found, name, THREE[name], table_of("1F1B", 3, 3, 4), mean=target == "megatron")


@pytest.mark.parametrize("schedule", LOOPED)
def test_four_stages_on_two_ranks_by_each_of_torchs_schedules(pools: Pools, schedule: str) -> None:
    cuts = ["layers.0", "layers.2", "layers.4"]
    same(ran(pools, 2, "Skips", cuts, "torch", schedule, 4), "Skips", cuts, table_of(schedule, 4, 2, 4), mean=False)


@pytest.mark.parametrize(
    ("name", "target"), [*(("Nested", target) for target in TARGETS), ("TiedThrice", "torch"), ("TiedThrice", "megatron")]
)
def test_a_tie_of_one_microbatch_has_the_models_gradient(pools: Pools, name: str, target: str) -> None:
    cuts = ["layers.0", "layers.1"]
    same(ran(pools, 3, name, cuts, target, "GPipe", 1), name, cuts, table_of("GPipe", 3, 3, 1), mean=target == "megatron")


@pytest.mark.parametrize("target", TARGETS)
def test_a_ties_gradients_are_summed_over_its_stages_and_alike_on_them(pools: Pools, target: str) -> None:
    found = ran(pools, 3, "Nested", THREE["Nested"], target, "GPipe", 4)
    alone = ran(pools, 3, "Nested", THREE["Nested"], "megatron" if target == "megatron" else "torch", "GPipe", 4)
    tied = "layers.0.weight"
    first, last = (alone[rank]["apart"][tied] for rank in (0, 2))
    assert not first.equal(last)
    assert tied not in found[1]["grads"]
    assert found[0]["grads"][tied] == found[2]["grads"][tied] == bits(first + last)


def test_an_unknown_target_is_named_with_the_nearest() -> None:
    with pytest.raises(StageError) as caught:
        target_of("deepsped")
    assert str(caught.value) == (
        'target "deepsped" is unknown, expected torch, deepspeed, megatron or module:callable; did you mean "deepspeed"?'
    )


def test_a_name_of_ones_own_gives_a_target_of_the_same_shape() -> None:
    model, stages, batches = parts_of("Skips", ["layers.1"], 1)
    setup = Setup(0, 1, 1)
    engine = target_of("suites.pipeline.test_targets:InTurn").engine(stages, setup)
    assert bits(engine(*batches[0])) == bits(model(*batches[0]))


class InTurn:
    """A target of one's own: all stages in one process."""

    def stage(self, stages: Stages, index: int, setup: Setup) -> Any:
        return stages[index]

    def engine(self, stages: Stages, setup: Setup) -> Any:
        def run(*args: Any) -> Any:
            values: Any = stages.batch(*args)
            for index in range(len(stages)):
                values = self.stage(stages, index, setup)(*values)
            return values

        return run


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("suites.pipeline.test_targets:bits", TypeError, "missing 1 required positional argument"),
        ("suites.pipeline.test_targets:InTurns", PlanError, 'has no "InTurns"; did you mean "InTurn"\\?'),
        ("builtins:dict", StageError, 'target "builtins:dict" gives a value of type dict without stage\\(\\), expected'),
    ],
)
def test_a_callable_that_gives_no_target_is_named(name: str, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        target_of(name)


def test_without_the_package_deepspeed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", None)
    _, stages, _ = parts_of("Skips", ["layers.1"], 1)
    with pytest.raises(StageError, match=r"^target deepspeed needs the package deepspeed \(pip install deepspeed\): "):
        target_of("deepspeed").engine(stages, Setup(0, 2, 1))


@pytest.mark.parametrize("target", ["deepspeed", "megatron"])
def test_engines_of_one_stage_a_rank_refuse_more(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", ModuleType("deepspeed.pipe"))
    _, stages, _ = parts_of("Skips", ["layers.1", "layers.2", "layers.3"], 1)
    with pytest.raises(StageError, match=f"^target {target} runs one stage a rank, but there are 4 stages on 2 ranks$"):
        target_of(target).engine(stages, Setup(0, 2, 1))


def test_a_megatron_chunk_without_its_input_says_so() -> None:
    _, stages, _ = parts_of("Skips", ["layers.1"], 1)
    chunk = target_of("megatron").stage(stages, 1, Setup(1, 2, 1))
    with pytest.raises(StageError, match=r"^stage 1 has no input; call set_input_tensor before it runs$"):
        chunk()


def test_an_output_that_is_no_scalar_needs_a_loss() -> None:
    assert loss_of(SimpleNamespace(loss=torch.tensor(2.0)), None, None).item() == 2
    assert loss_of(torch.ones(3), torch.tensor(4.0), lambda output, target: output.sum() * target).item() == 12
    with pytest.raises(StageError, match=r"^the loss of the last stage is a tensor of \[3\], expected a scalar .* a loss$"):
        loss_of(torch.ones(3), None, None)
    with pytest.raises(StageError, match="is a value of type dict, expected a scalar tensor"):
        loss_of({"x": torch.ones(())}, None, None)


@pytest.mark.parametrize("target", TARGETS)
def test_hooks_of_the_model_run_on_the_first_and_the_last_rank_with_real_values(pools: Pools, target: str) -> None:
    cuts = THREE["Skips"]
    first, middle, last = pools.get(3).run(
        "suites.pipeline.target_jobs:hooked", [("Skips", cuts, target, "GPipe", 2)] * 3, timeout_s=60
    )
    model, _, batches = parts_of("Skips", cuts, 2)
    inputs, outputs = [bits(batch) for batch in batches], [bits(model(*batch)) for batch in batches]
    assert first == {"before": inputs, "behind": []}
    assert middle == {"before": [], "behind": []}
    assert last == {"before": [], "behind": list(zip(inputs, outputs, strict=True))}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_a_value_that_is_dense_in_another_order_is_sent_as_its_memory_is(order: tuple[int, ...]) -> None:
    value = torch.randn(2, 3, 4).permute(*order)
    said = Crossing("x", "", 0, tuple(value.shape), value.stride(), value.dtype, value.numel() * 4)
    sent = _sent(value, said)
    assert sent.is_contiguous()
    assert sent.data_ptr() == value.data_ptr()
    back = _traced(sent, said)
    assert back.equal(value)
    assert back.stride() == value.stride()


def test_a_value_of_no_dimensions_is_sent() -> None:
    value = torch.tensor(3.0)
    said = Crossing("x", "", 0, (), (), value.dtype, 4)
    assert _traced(_sent(value, said), said).equal(value)


class Counting(nn.Module):
    """Counts its calls in a buffer of no fake operand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x) * self.calls.clone()  # type: ignore[no-any-return]  # torch types it so


def test_finding_out_what_crosses_leaves_the_models_buffers_as_they_are() -> None:
    model = nn.Sequential(Counting(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    stages = split_stages(model, ["1"], (torch.randn(3, 4),))
    before = {fqn: buffer.clone() for fqn, buffer in model.named_buffers()}
    assert [tuple(one.shape for one in given) for _, given in _alone(stages)] == [((3, 4),), ((3, 2),)]
    assert all(buffer.equal(before[fqn]) for fqn, buffer in model.named_buffers())
