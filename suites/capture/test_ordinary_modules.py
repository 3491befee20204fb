"""Modules as people write them: each with the gradients of eager mode, bit for bit, and with a plan that is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from capture_models import WIDTH
from parity import ROOT, assert_same, by_hand, payload_of
from steps import captured, made_by, plan_of, sent_by

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Bucket, Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

MODULES: dict[str, dict[str, Any]] = {
    "by_own_orders": {},
    "casts": {"entries": ["first", "second", "rows"]},
    "reads": {"entries": ["inner", "other+penalised", "scale+shift+listed+named"]},
    "averages": {},
    "complex_filter": {},
    "pooled": {"entries": ["layer+pooler+more"]},
    "reads_early": {"entries": ["layers.*", "table"]},
    "zeroed": {},
    "depthwise": {},
    "logit_scale": {
        "entries": ["linear+logit_scale"],
        "notes": " (logit_scale without dimension, sharded as one element, where FSDP2 asks for the shape (1,))",
    },
    "looks": {"notes": " (0.tokens, 0 with dense gradients in place of sparse ones)"},
    "compiled": {"notes": " (0.inner, 1 run as what torch.compile wraps)"},
    "holds": {
        "notes": " (0.table, 0.tables['a'][0], ordinary_models.TABLE held in no parameter or buffer, and inputs all the same)",
    },
}


def plan_for(name: str, entries: list[str] | None = None, **rest: Any) -> Plan:
    """The plan of ``ordinary_models``' model on two ranks, one bucket for each of ``entries``, by default its children."""
    plan = plan_of(name, of="ordinary_models", dp_shard=2, **rest)
    return replace(plan, bucket=Bucket(plan=tuple(parse_entries(entries or ["*"], "[bucket] plan"))))


@pytest.mark.parametrize(("name", "rest"), MODULES.items(), ids=MODULES)
def test_its_plan_is_kept_and_its_gradients_are_those_of_eager(
    name: str, rest: dict[str, Any], pools: Pools, tmp_path: Path
) -> None:
    plan = plan_for(name, rest.get("entries"))
    run = PlanRun(plan, RunSettings(ROOT, tmp_path / "golden", tmp_path / "artifacts"), pools)
    verdict = run.check("audit")
    assert verdict.outcome == "passed", verdict.lines
    assert verdict.summary.partition("2 ranks")[2] == rest.get("notes", "")
    payload = payload_of(plan, run.step, **by_hand(plan, "dp_shard", share=(0, 2, range(2))))
    assert_same(pools, payload | {"units": []}, "by_hand:by_hand_steps")


def test_weights_that_an_rnn_keeps_a_list_of_are_gathered_and_get_gradients() -> None:
    step = captured("recurrent", of="ordinary_models")
    weights = [parameter.fqn for parameter in step.parameters]
    assert sorted(set(sent_by(step).values())) == sorted(made_by(step).values()) == sorted(weights)


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        (
            "complex_filter",
            {"param_dtype": "bfloat16"},
            'parameter 1.filter is torch.complex64, of which param_dtype = "bfloat16" would drop the imaginary part, as FSDP2 '
            "does; leave param_dtype out, or hold real and imaginary parts as two parameters",
        ),
        (
            "averages",
            {"args": {"rows": 4}},
            "buffer 0.average, [1, 8] in torch.float32, is replaced in forward by one of [4, 8] in torch.float32; only its "
            "values may change, since one graph serves all steps",
        ),
        (
            "holds",
            {"args": {"trained": True}},
            "0.tables['a'][0] requires grad and is used in forward, but is no parameter of the model; make it one "
            "(torch.nn.Parameter, in an attribute of its module), or detach it",
        ),
        (
            "holds",
            {"args": {"written": True}},
            "0.table is written in place in forward (aten.add_.Tensor), so the next step would need it, but it is no buffer; "
            "register it with register_buffer",
        ),
    ],
)
def test_what_cannot_be_right_is_named_with_the_way_out(name: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(name, of="ordinary_models", **asked)
    assert str(caught.value) == said


LATE = """
import torch
from torch import nn
from ordinary_models import batch as drawn, loss

class Late(nn.Linear):
    def forward(self, x):
        return super().forward(x) * TABLE

def build():
    return nn.Sequential(nn.Linear({width}, {width}), Late({width}, {width}))

def batch(rank, step):
    global TABLE
    TABLE = torch.full(({width},), 2.0)
    return drawn(rank, step)
"""


def test_a_tensor_that_the_batch_makes_is_there_in_the_ranks_too(tmp_path: Path, pools: Pools) -> None:
    (tmp_path / "late_table.py").write_text(LATE.format(width=WIDTH))
    lines = ("build", "factory"), ("batch", "batch"), ("loss", "loss")
    model = "".join(f'{key} = "late_table:{name}"\n' for name, key in lines)
    (tmp_path / "late.toml").write_text(f'[model]\n{model}[parallel]\ndp_shard = 2\n[bucket]\nplan = ["[0-1]"]\n')
    (plan,) = load_plans(tmp_path / "late.toml")
    verdict = PlanRun(plan, RunSettings(ROOT, tmp_path / "golden", tmp_path / "artifacts"), pools).check("bitwise")
    assert verdict.outcome == "passed", verdict.lines
