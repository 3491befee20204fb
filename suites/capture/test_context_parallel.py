"""Sequences parted over cp: the step of whole sequences but for the order of sums, and what is said where it cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from fixtures.models import llama, llama_sdpa
from pytest_fxbucket import captured_plan
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.parallel import ring_attention, sequence_parallel
from pytest_fxbucket.capture.parallel.context_parallel import AttentionToAll
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.compat.modules import on_in_backward
from pytest_fxbucket.eager.context_parallel import WholeSequence
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.mesh import Group, mesh_with
from suites.capture.parity import payload_of, run_each, small
from suites.eager.test_parting import FirstOfTwo

STEPS = 2


def one_step(form: str = "gathered", args: Any = (("layers", 1), ("dim", 16)), **model: str) -> Plan:
    """The small plan of the form for one step, or with another ``model``."""
    plan = small("cp.ring" if form == "ring" else "cp", args)
    assert plan.model is not None
    return replace(plan, model=replace(plan.model, **model), run=replace(plan.run, steps=1))


CP, RING = one_step(), one_step("ring")
SHAPE = llama.LlamaShape(1, 16, 4, 2)

Checked = Callable[..., Verdict]
Steps = list[tuple[list[Tensor], dict[str, Tensor]]]
"""Of each the losses of both batches, and the gradients."""


def of_whole_sequences(plan: Plan) -> Steps:
    """Steps of one process."""
    torch.manual_seed(plan.run.seed)
    model, found = llama_sdpa.build(layers=1, dim=16), Steps()
    for step in range(STEPS):
        batches = [llama_sdpa.batch(rank, step) for rank in range(plan.parallel.dp_shard)]
        losses = [llama_sdpa.loss(model(tokens, positions), targets) for tokens, positions, targets in batches]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        names = [fqn for fqn, _ in model.named_parameters()]
        found.append(([loss.detach() for loss in losses], dict(zip(names, gradients, strict=True))))
    return found


def distance(plan: Plan, pools: Pools) -> float:
    """The largest difference of losses, and of gradients as a share of the largest element."""
    world, parts = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), print), "manual"), plan.parallel.cp
    ranks = run_each(pools, "parity_jobs:graph_steps", [payload_of(plan, world.step(rank), steps=STEPS) for rank in range(4)])
    off = 0.0
    for number, (losses, gradients) in enumerate(of_whole_sequences(plan)):
        made = [rank["steps"][number] for rank in ranks]
        for batch, loss in enumerate(losses):
            own = [one["loss"] for one in made[parts * batch : parts * (batch + 1)]]
            off = max(off, float((torch.stack(own).mean() - loss).abs()))
        for fqn, expected in gradients.items():
            whole = torch.cat([one["gradients"][fqn] for one in made])
            off = max(off, float((whole - expected).abs().max() / expected.abs().max()))
    return off


@pytest.mark.parametrize("plan", [CP, RING], ids=["gathered", "ring"])
def test_two_steps_are_those_of_whole_sequences_but_for_the_order_of_sums(plan: Plan, pools: Pools) -> None:
    assert distance(plan, pools) < 1e-5  # float32: 1.2e-7 a sum


def own_alone(addend: Tensor, group: Group, dim: int = 1) -> Tensor:
    """The gradient of the part that comes first, for what should be the sum of all ranks' of this one's."""
    return addend.chunk(group.size, dim)[0].contiguous()


def all_blocks(seen: Tensor, these: Sequence[Tensor], those: Sequence[Tensor]) -> Sequence[Tensor]:
    """Those behind a rank's own part, too."""
    return these


FAULTS = {
    "gradients of keys and values that are not summed": (CP, sequence_parallel, "reduced", own_alone),
    "blocks behind are seen": (RING, ring_attention, "_where", all_blocks),
}


@pytest.mark.parametrize(("plan", "of", "name", "wrong"), FAULTS.values(), ids=FAULTS.keys())
def test_of_a_wrong_capture_eager_is_red(
    plan: Plan, of: object, name: str, wrong: Callable[..., Any], checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, wrong)
    verdict = checked(plan, "eager", backend="local")
    assert verdict.outcome == "failed"
    assert any("elements differ" in line for line in verdict.lines), verdict.lines


def test_ranks_that_all_send_to_the_second_one_are_found(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_plan, "at_place", lambda step, mesh, rank: step)
    verdict = checked(RING, "collectives")
    assert verdict.outcome == "failed"
    assert re.fullmatch(
        r"collective \d+ on ranks 0-3 differs: rank 0 sends 128 rows to rank 1 by all_to_all_single \(.*\), "
        "which expects 0 of it",
        verdict.lines[0],
    )


@pytest.mark.parametrize("plan", [CP, RING], ids=["gathered", "ring"])
def test_copies_whose_parameters_are_sharded_over_cp_alone_have_fsdp2s_bits(plan: Plan, checked: Checked) -> None:
    parallel = replace(plan.parallel, mode="hybrid_shard", dp_shard=1, dp_replicate=2)
    for check in ("audit", "bitwise", "eager"):
        verdict = checked(replace(plan, parallel=parallel), check, backend="local")
        assert verdict, verdict


@pytest.mark.parametrize("form", ["gathered", "ring"])
def test_what_checkpoints_compute_again_attends_to_all_too(form: str, checked: Checked) -> None:
    """Where ranks are threads, each in its own attention: what one process may do is a part of that."""
    plan = one_step(form, {"is_reentrant": form == "gathered"}, factory=f"{HERE}:checkpointed")
    assert checked(plan, "eager", backend="local").outcome == "passed"


def test_checkpoints_are_torchs_own_again_whichever_rank_leaves_first() -> None:
    before = torch_checkpoint._CheckpointFrame
    is_in, has_left = [Event(), Event()], Event()

    def enter(rank: int) -> bool:
        is_in[rank - 1].wait() if rank else None
        with on_in_backward(AttentionToAll(Group("cp", 2), torch.tensor(rank), "ring")):
            is_in[rank].set()
            (has_left if rank else is_in[1]).wait()
            is_wrapped = torch_checkpoint._CheckpointFrame is not before
        has_left.set()
        return is_wrapped

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(enter, range(2))) == [True, True]
    assert torch_checkpoint._CheckpointFrame is before


class Counts(llama.Llama):
    """Counts positions by itself, so those of each part begin at 0."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


def counts() -> nn.Module:
    return Counts(SHAPE, llama_sdpa.Attention)


class Checkpointed(llama_sdpa.Llama):
    """Computes its layers again in backward, by itself."""

    is_reentrant = False

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, positions, use_reentrant=self.is_reentrant)
        out: Tensor = self.output(self.norm(x))
        return out


def checkpointed(is_reentrant: bool) -> nn.Module:
    model = Checkpointed(SHAPE, llama_sdpa.Attention)
    model.is_reentrant = is_reentrant
    return model


def tokens_and_targets(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return llama_sdpa.batch(rank, step)[::2]


def test_eager_is_red_for_a_model_that_counts_positions_by_itself(checked: Checked) -> None:
    plan = one_step(args={}, factory=f"{HERE}:counts", batch=f"{HERE}:tokens_and_targets")
    verdict = checked(plan, "eager", backend="local")
    assert verdict.outcome == "failed"
    (line,) = verdict.lines
    assert "of a part of the sequence the model gives other values than of the whole, by " in line
    assert line.endswith("let the batch give them: cp cuts them as it cuts tokens")


def test_eager_is_red_with_what_some_ranks_raise_of_their_part_while_others_wait(checked: Checked) -> None:
    verdict = checked(one_step(args={}, factory=f"{HERE}:begins_at_0"), "eager")
    assert verdict.outcome == "failed"
    assert "raised PartError: the model, in float32 and eval(), takes whole sequences but raises ValueError" in verdict.summary


def begins_at_0() -> nn.Module:
    return BeginsAt0(SHAPE, llama_sdpa.Attention)


class BeginsAt0(llama_sdpa.Llama):
    """Out of training it takes no later part of a sequence."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if not self.training and positions[0, 0] > 0:
            raise ValueError("no beginning")
        return super().forward(tokens, positions)


def test_eager_says_what_it_did_not_ask(checked: Checked) -> None:
    verdict = checked(one_step(args={}, factory=f"{HERE}:halved"), "eager", backend="local")
    assert verdict.outcome == "passed"
    assert "; not asked whether parts of sequences give what wholes do: the model computes in 16 bits" in verdict.summary


def halved() -> nn.Module:
    return Halved(SHAPE, llama_sdpa.Attention)


class Halved(llama_sdpa.Llama):
    """Rounds its logits."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, positions).bfloat16()


class Attends(nn.Module):
    """Attention of another kind than can be parted."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(128, 8)
        self.own = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.how == "own":
            return self.own(x, x, x, need_weights=False)[0]
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        if self.how == "masked":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)
        if self.how == "crossed":
            return (
                nn.functional.scaled_dot_product_attention(heads, heads[:, :, :2], heads[:, :, :2]).transpose(1, 2).flatten(2)
            )
        if self.how == "few":
            return nn.functional.scaled_dot_product_attention(heads.repeat(1, 2, 1, 1), heads, heads).transpose(1, 2).flatten(2)
        return x.cumsum(1) if self.how == "none" else x


def attends(how: str) -> nn.Module:
    return Attends(how)


def batch_of_fifteen(rank: int, step: int) -> tuple[Tensor, ...]:
    return tuple(one[:, :15] for one in llama_sdpa.batch(rank, step))


HERE = "suites.capture.test_context_parallel"
REFUSED = {
    "none": "cp parts the sequence, but the model never calls torch.nn.functional.scaled_dot_product_attention, so no token "
    "would see those of other ranks; attend by it, or leave cp out",
    "masked": "cp parts the sequence, but scaled_dot_product_attention is given a mask of shape (8, 8), which is of a rank's "
    "part alone; use is_causal = True, or no mask",
    "crossed": "cp parts the sequence of queries and keys alike, each (batch, heads, sequence, head_dim), but "
    "scaled_dot_product_attention is given (2, 2, 8, 4) and (2, 2, 2, 4)",
    "own": "cp parts the sequence, and torch.nn.MultiheadAttention has attention of its own, which would see a rank's part "
    "alone; call torch.nn.functional.scaled_dot_product_attention",
}


@pytest.mark.parametrize("how", REFUSED)
def test_attention_that_cannot_be_parted_is_one_sentence(how: str) -> None:
    plan = one_step(args={"how": how}, factory=f"{HERE}:attends")
    with pytest.raises(CaptureError) as caught:
        capture_plan(plan, mesh_of(plan), 0)
    assert str(caught.value).endswith(REFUSED[how])


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("gathered", "RuntimeError: The size of tensor a (4) must match the size of tensor b (2)"),
        ("ring", "with enable_gqa=True alone;"),
    ],
)
def test_heads_are_shared_where_torch_shares_them_alone(form: str, says: str) -> None:
    few = one_step(form, {"how": "few"}, factory=f"{HERE}:attends")
    with pytest.raises(CaptureError, match=re.escape(says)):
        capture_plan(few, mesh_of(few), 0)


IN_BLOCKS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any], str]] = {
    "dropout": (
        [(2, 4, 8, 4)] * 3,
        {"dropout_p": 0.5},
        "cp_form ring attends block by block, which has no dropout, but dropout_p is 0.5; ",
    ),
    "head_dim": (
        [(2, 4, 8, 4), (2, 4, 8, 4), (2, 4, 8, 2)],
        {},
        "cp_form ring attends by torch's flash kernel, whose queries, keys and values have one head_dim, but "
        "scaled_dot_product_attention is given 4, 4 and 2; ",
    ),
    "not shared": (
        [(2, 4, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4)],
        {"is_causal": True},
        "scaled_dot_product_attention is given 4 heads of queries and 2 of keys and values, which queries share with "
        "enable_gqa=True alone; give it that, in a ring as without cp",
    ),
    "no divisor": (
        [(2, 3, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4)],
        {"enable_gqa": True},
        "cp_form ring takes keys and values of as many heads, which divide those of queries, and of their batch, but "
        "scaled_dot_product_attention is given (2, 3, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4); ",
    ),
    "other heads of values": ([(2, 4, 8, 4), (2, 2, 8, 4), (2, 4, 8, 4)], {"enable_gqa": True}, "cp_form ring takes keys and"),
    "one batch for all": ([(2, 4, 8, 4), (1, 4, 8, 4), (1, 4, 8, 4)], {}, "cp_form ring takes keys and values of as many"),
}
"""Shapes of queries, keys and values, what else attention is given, and what a ring says of it."""


@pytest.mark.parametrize("case", IN_BLOCKS)
def test_attention_that_has_no_blocks_is_one_sentence_and_its_twin_in_eager_refuses_it_too(case: str) -> None:
    shapes, more, says = IN_BLOCKS[case]
    attend = partial(nn.functional.scaled_dot_product_attention, *(torch.zeros(shape) for shape in shapes), **more)
    with AttentionToAll(Group("cp", 2), torch.tensor(0), "ring"), pytest.raises(CaptureError) as caught:
        attend()
    assert str(caught.value).startswith(says)
    assert case == "not shared" or str(caught.value).endswith('; use cp_form = "all_gather"')
    of_twin = "which takes enable_gqa=True" if case == "not shared" else "ring attention takes keys and values of one shape, "
    with WholeSequence(FirstOfTwo(), "ring"), pytest.raises(ValueError, match=of_twin):
        attend()


def test_a_sequence_that_does_not_divide_is_one_sentence() -> None:
    plan = one_step(batch=f"{HERE}:batch_of_fifteen")
    with pytest.raises(CaptureError) as caught:
        capture_plan(plan, mesh_of(plan), 0)
    assert str(caught.value) == (
        "cp = 2 does not divide dimension 1 of [0], whose shape is (2, 15); give sequences of another length, or use another cp"
    )


def test_ranks_along_cp_get_parts_of_one_batch_and_share_what_they_shard() -> None:
    mesh = mesh_with({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2})
    assert mesh.data_ranks == 4
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.sharing_batches()[:2] == [[0, 1], [2, 3]]
    assert mesh.ranks(0, mesh.data_parallel("dp_shard")) == (0, 2, 4, 6)
    assert mesh_with({"cp": 4}).data_parallel("dp_shard") == "cp"
    assert list(mesh_with({"dp_shard": 2, "cp": 2}).groups(3)) == ["mesh_dp_shard", "mesh_cp"]
