"""What ranks are fed is what was traced, in every step: another dtype, shape or number of tensors is no green."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.batch import RankBatches, batch_of
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.step.roles import Value

TRACED = (Value("param", "w", (2,), torch.float32), Value("batch", "['x']", (3, 8), torch.float32))
FIRST = {"x": torch.ones(3, 8), "scale": 2.0, "mask": None}
ONLY = "; only the values of its tensors may change, since one graph serves all"


@pytest.mark.parametrize(
    ("other", "became"),
    [
        ({**FIRST, "x": torch.ones(3, 8).double()}, "['x'] (3, 8) torch.float64"),
        ({**FIRST, "x": torch.ones(3, 7)}, "['x'] (3, 7) torch.float32"),
        ({**FIRST, "x": None}, "nothing"),
        ({"y": FIRST["x"]}, "['y'] (3, 8) torch.float32"),
        (None, "nothing"),
    ],
    ids=["dtype", "shape", "none", "name", "nothing"],
)
def test_tensors_that_were_not_traced_are_refused_in_any_step(other: Any, became: str) -> None:
    followed = RankBatches("m:batch", 3, TRACED)
    assert [tuple(tensor.shape) for tensor in followed.tensors(FIRST, 0)] == [(3, 8)]
    with pytest.raises(CaptureError) as caught:
        followed.tensors(other, 5)
    was = "['x'] (3, 8) torch.float32 where the step was traced"
    assert str(caught.value) == f"[model] batch m:batch gave {was}, but {became} for rank 3, step 5{ONLY}"


@pytest.mark.parametrize(("key", "value", "became"), [("scale", 3.0, "['scale'] 3.0"), ("mask", True, "['mask'] True")])
def test_constants_that_change_are_refused_since_the_graph_has_the_first(key: str, value: object, became: str) -> None:
    followed = RankBatches("m:batch", 0, TRACED)
    followed.tensors(FIRST, 0)
    with pytest.raises(CaptureError, match="for rank 0 before, but ") as caught:
        followed.tensors({**FIRST, key: value}, 2)
    assert f"but {became} for rank 0, step 2" in str(caught.value)


def test_an_extra_tensor_is_refused() -> None:
    followed = RankBatches("m:batch", 0, TRACED)
    with pytest.raises(CaptureError, match=r"gave nothing where the step was traced, but \['z'\] \(1,\) torch.float32"):
        followed.tensors({**FIRST, "z": torch.ones(1)}, 0)


def test_a_batch_that_contains_itself_is_one_sentence() -> None:
    batch: list[Any] = [torch.ones(1)]
    batch.append(batch)
    with pytest.raises(CaptureError, match="contains itself, or is nested too deep"):
        batch_of(batch)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wider", "torch.float64 for rank"),
        ("on_one_rank", "for rank 1, step 0"),
        ("skips", "raised Skipped: not here"),
        ("ends", "raised SystemExit: 0"),
    ],
)
def test_bitwise_is_red_for_batches_that_change_or_end_after_capture(
    bitwise: Callable[..., Verdict], name: str, says: str
) -> None:
    verdict = bitwise(model={"batch": f"changing_batches:{name}"}, run=Run(steps=3, timeout_s=60))
    assert verdict.outcome == "failed"
    assert says in "\n".join(verdict.lines)
