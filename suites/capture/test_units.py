"""dtypes between entries: inputs of each are cast as FSDP2 casts those of its units; what cannot run is found early."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from steps import captured, plan_of

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Bucket, Plan
from pytest_fxbucket.step.mesh import shard_mesh


def floating(*entries: str, factory: str = "floats_between", **parallel: object) -> Plan:
    plan = plan_of(factory, **{"param_dtype": "bfloat16", "reduce_dtype": "float32", **parallel})
    return replace(plan, bucket=Bucket(plan=parse_entries(list(entries), "plan")))


def test_without_a_param_dtype_nothing_is_cast() -> None:
    step = capture_plan(floating("layers.[0-2]", "head", param_dtype=None), shard_mesh(4), 0)
    casts = [node for node in step.graphs["joint"].graph.nodes if node.target is torch.ops.aten._to_copy.default]
    assert not [node for node in casts if node.meta["val"].dtype == torch.bfloat16]


def test_a_dtype_error_within_a_unit_is_found_at_capture_and_names_the_module() -> None:
    with pytest.raises(CaptureError) as caught:
        captured("floats_between", param_dtype="bfloat16")
    said = str(caught.value)
    assert said.startswith(
        "module layers.1.linear gives aten.addmm.default tensors of bfloat16 and float32, which torch refuses"
    )
    assert "cast one to the dtype of the other, as with x.to(weight.dtype)" in said


@pytest.mark.parametrize("factory", ["norms_in_float32", "scatters_other_dtype"])
def test_what_eager_refuses_is_refused(factory: str) -> None:
    with pytest.raises(CaptureError, match="which torch refuses to run"):
        captured(factory, param_dtype="bfloat16")


def test_a_norm_with_float32_weights_may_be_given_bfloat16() -> None:
    captured("norm_of_half")
