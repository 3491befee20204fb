"""A captured step as data: roles, order, inputs; the same on every rank and hash seed; nothing left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.joint import JointStep, trace_joint
from pytest_fxbucket.capture.parallel.forwards import Forwards
from pytest_fxbucket.capture.parallel.parts import ParameterShards
from pytest_fxbucket.capture.parallel.sequence_parallel import SequenceModules
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_model import Parallel
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.portable import digest, encode_module
from pytest_fxbucket.step.roles import Value
from suites.capture import capture_models
from suites.capture.parity import payload_of, run
from suites.capture.steps import captured, plan_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def test_inputs_are_shards_then_buffers_then_batch_and_outputs_loss_then_gradients() -> None:
    step = captured("normalised", batch="batch")
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    buffers = {"1.running_mean": (8,), "1.running_var": (8,), "1.num_batches_tracked": ()}
    shards = {name: (2, 8) if name in ("0.weight", "2.weight") else (2,) for name in names}
    assert step.inputs["joint"] == (
        *(Value("param", name, shards[name], torch.float32) for name in names),
        *(Value("buffer", n, s, torch.int64 if n.endswith("tracked") else torch.float32) for n, s in buffers.items()),
        Value("batch", "[0]", (4, 8), torch.float32),
    )
    grads = [Value("grad", name, shards[name], torch.float32) for name in names]
    assert step.outputs["joint"] == (Value("loss", "", (), None), *grads)
    placeholders = [n for n in step.graphs["joint"].graph.nodes if n.op == "placeholder"]
    assert [tuple(n.meta["val"].shape) for n in placeholders] == [v.shape for v in step.inputs["joint"]]
    returned = step.graphs["joint"].graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    assert [tuple(n.meta["val"].shape) for n in returned] == [v.shape for v in step.outputs["joint"]]


def test_keyword_batches_are_named_by_their_keys() -> None:
    step = captured("residual", batch="keyword_batch")
    assert [value.fqn for value in step.inputs["joint"] if value.role == "batch"] == ["['x']"]


def test_floating_inputs_are_cast_for_the_model_and_not_for_the_loss() -> None:
    step = captured("residual", loss="loss_of_batch", param_dtype="bfloat16")
    matmul = next(n for n in step.graphs["joint"].graph.nodes if "addmm" in str(n.target))
    assert matmul.args[1].meta["val"].dtype == torch.bfloat16
    assert step.inputs["joint"][-1].dtype == torch.float32


def test_batch_norm_statistics_are_written_on_ranks_as_eager_writes_them(pools: Pools) -> None:
    plan = plan_of("normalised")
    results = run(pools, "parity_jobs:graph_steps", payload_of(plan, captured("normalised"), steps=2, lr=0.0))
    for rank, result in enumerate(results):
        torch.manual_seed(0)
        eager = capture_models.normalised()
        for number in range(2):
            eager(*capture_models.batch(rank, number))
        for name, buffer in eager.named_buffers():
            torch.testing.assert_close(result["buffers"][name], buffer, msg=f"{name} of rank {rank}")


def test_a_literal_in_forward_keeps_its_value(pools: Pools) -> None:
    step = captured("behind multiplies_by_a_literal")
    portable = encode_module(step.graphs["joint"])
    assert [value.tolist() for value in portable.attributes.values()] == [[0.5] * 8]


def test_a_tensor_beside_a_list_that_contains_itself_is_an_input() -> None:
    step = captured("HoldsItself")
    assert [value.fqn for value in step.inputs["joint"] if value.role == "held"] == ["tables['scale']"]


def classes_of(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def capture_given(model: nn.Module, mode: FakeTensorMode, loss: Any = capture_models.loss) -> None:
    parts = ParameterShards.of(Parallel(dp_shard=4), shard_mesh(4))
    given = capture_models.batch(0, 0), loss, parts, Forwards({}, SequenceModules(), {}, ()), mode
    trace_joint(model, lambda: JointStep(model, *given))


@pytest.mark.parametrize("factory", ["residual", "asks_a_value", "loses"])
def test_a_model_has_its_own_classes_and_hooks_again_whatever_happened(factory: str) -> None:
    with fake_world(0, 4):
        mode = FakeTensorMode()
        with mode:
            model = capture_models.residual() if factory == "residual" else capture_models.behind(factory)
        before, parameters = classes_of(model), dict(model.named_parameters())
        if factory == "residual":
            capture_given(model, mode)
        else:
            with pytest.raises(CaptureError):
                capture_given(model, mode)
    assert classes_of(model) == before
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_later_model_is_not_touched_by_the_dtypes_and_mesh_of_an_earlier_one() -> None:
    alone = digest(encode_module(captured("residual").graphs["joint"]))
    captured("residual", ranks=8, param_dtype="bfloat16", reduce_dtype="float32", reshard_after_forward=False)
    assert digest(encode_module(captured("residual").graphs["joint"])) == alone
    assert [type(m).__name__ for m in capture_models.residual().modules()].count("Linear") == 4


def test_a_mesh_of_4096_ranks_is_traced_in_this_process() -> None:
    step = captured("residual", ranks=4096, rank=4095)
    assert (step.mesh[0].name, step.mesh[0].size) == ("dp_shard", 4096)
    assert [p.shard_shape for p in step.parameters[:2]] == [(1, 8), (1,)]


@pytest.mark.parametrize("factory", ["residual", "uneven", "Tied", "normalised"])
def test_every_rank_traces_the_same_graph(factory: str) -> None:
    first, last = (encode_module(captured(factory, rank=rank).graphs["joint"]) for rank in (0, 3))
    assert first.rows == last.rows
    assert digest(first) == digest(last)


def test_the_seed_does_not_change_the_graph() -> None:
    plan = plan_of("residual")
    other = replace(plan, run=replace(plan.run, seed=7))
    one, two = (digest(encode_module(capture_plan(p, shard_mesh(4), 0).graphs["joint"])) for p in (plan, other))
    assert one == two


def test_a_tensor_that_the_batch_makes_is_there_in_the_ranks_too(checked: Any) -> None:
    plan = plan_of("behind reads_a_table", batch="batch_with_table", dp_shard=2)
    verdict = checked(replace(plan, bucket=Bucket(unplanned="root")), "bitwise")
    assert verdict.outcome == "passed", verdict.lines
