"""Activations parted along the sequence: the step of torch's SequenceParallel, and what is said of a plan that cannot be it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.parallel import sequence_parallel, unshard
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.mesh import Group
from suites.eager.eager_net import Run, plan_of

STYLES = {
    "embed": "scatter",
    "first+second+attention.norm": "sequence",
    "attention+mlp": "sequence",
    "attention.q+attention.k+attention.v+mlp.0": "colwise",
    "attention.o+mlp.2": "rowwise",
    "head": "gather",
}


def text(styles: dict[str, str] | None = None, args: str = "", batch: str = "batch") -> str:
    written = ", ".join(f'"{one}" = "{style}"' for name, style in (styles or STYLES).items() for one in name.split("+"))
    return f"""
[model]
factory = "suites.eager.sequence_models:build"
args = {{ {args} }}
batch = "suites.eager.sequence_models:{batch}"
loss = "suites.eager.sequence_models:loss"
[parallel]
dp_shard = 2
tp = 2
tp_plan = {{ {written} }}
[bucket]
plan = ["embed", "first+attention", "second+mlp", "head"]
[eager]
rounds_otherwise = ["rowwise_bias"]
[run]
timeout_s = 60
"""


def test_biases_and_norms_within_heads_are_torchs_bit_for_bit(run: Run) -> None:
    verdict = run(text())
    assert verdict, verdict


def unsummed(gradient: torch.Tensor, group: Group) -> torch.Tensor:
    return gradient


def reversed_parts(part: torch.Tensor, group: Group, dim: int = 1) -> torch.Tensor:
    return torch.cat(right(part, group, dim).chunk(group.size, dim)[::-1], dim)


right = sequence_parallel.gathered
FAULTS: dict[str, tuple[object, str, Callable[..., torch.Tensor], str, str]] = {
    "gradients of norms that are not summed over tp": (
        *(unshard, "summed", unsummed),
        *("bitwise", "hold copies of "),
    ),
    "parts gathered in another order": (
        *(sequence_parallel, "gathered", reversed_parts),
        *("eager", "first module whose output differs"),
    ),
}


@pytest.mark.parametrize(("of", "name", "wrong", "check", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_a_wrong_capture_is_red(
    of: object, name: str, wrong: Callable[..., torch.Tensor], check: str, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, wrong)
    verdict = run(text(), check, anew=True)
    assert verdict.outcome == "failed"
    assert words in "\n".join(verdict.lines), verdict.lines


def without(*names: str, **more: str) -> dict[str, str]:
    return {name: style for name, style in STYLES.items() if name not in names} | more


REFUSED = {
    "a sequence that does not divide": (
        text(batch="batch_of_seven"),
        "tp_plan scatters the output of embed, which must be a tensor of (batch, sequence, ...) whose sequence tp = 2 divides, "
        "but it is a tensor of shape (4, 7, 16)",
    ),
    "a parameter that reads what is gathered": (
        text(without("first+second+attention.norm", first="sequence", second="sequence")),
        "tp_plan makes attention sequence, so all that reads its input is to be parted over tp, but parameter "
        'attention.norm.weight is not; make its module colwise or rowwise, or, if it reads what those give, "sequence", too',
    ),
    "a module that gives all of the sequence": (
        text(without("attention.o+mlp.2", **{"attention.o": "rowwise"}), "short = true"),
        "tp_plan makes mlp sequence, so it must give a rank's part of the sequence, 4 of 8, but its output has the shape "
        "(4, 8, 8); make the linear that it ends with rowwise",
    ),
    "a parameter that is read on a part and on all": (
        text(args="tied = true"),
        "head.bias and second.bias are one tied parameter, but tp_plan has one of them read on a part of the sequence and the "
        "other on all of it; give both one way",
    ),
}


@pytest.mark.parametrize(("plan", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_a_plan_whose_parts_do_not_fit_is_one_sentence(plan: str, says: str) -> None:
    given = plan_of(plan)
    with pytest.raises(CaptureError) as caught:
        capture_plan(given, mesh_of(given), 0)
    assert str(caught.value) == says


def test_stages_that_would_cast_before_they_sum_are_refused(run: Run) -> None:
    low = text().replace("tp = 2\n", 'tp = 2\npp = 2\nparam_dtype = "bfloat16"\nreduce_dtype = "float32"\n')
    with pytest.raises(CaptureError, match="is summed over tp before it is cast to reduce_dtype, and stages add microbatches"):
        run(f'{low}[pipeline]\ncuts = ["attention"]\nschedule = "GPipe"\n', "audit")
