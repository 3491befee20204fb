"""Bitwise of steps whose work crosses iterations, on real ranks: equal for one step and for many, red for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.transforms.registry import BUILT_IN

PLAN = """
[model]
factory = "suites.checks.moved_models:build"
batch = "suites.checks.moved_models:batch"
loss = "suites.checks.moved_models:loss"
[parallel]
dp_shard = {ranks}
[optimizer]
factory = "torch.optim:{optimizer}"
args = {{ {args} }}
groups = "entry"
[bucket]
plan = ["a", "b", "c", "d"]
[overlap]
updates = "ready"
[run]
steps = {steps}
timeout_s = 60
[[transform]]
name = "{transform}"
args = {{ entries = ["c", "d"]{more} }}
"""
ADAMW, SGD = ("AdamW", "lr = 0.01, fused = true"), ("SGD", "lr = 0.1, momentum = 0.9")
ROOT = Path(__file__).resolve().parents[2]


def run(
    pools: Pools, tmp_path: Path, check: str, change: str = "", ranks: int = 2, steps: int = 3, of: tuple[str, str] = ADAMW
) -> Verdict:
    transform = "suites.checks.moved_graphs:broken_iteration" if change else "next_iteration"
    more = f', change = "{change}"' if change else ""
    text = PLAN.format(ranks=ranks, steps=steps, optimizer=of[0], args=of[1], transform=transform, more=more)
    (plan,) = parse_plans(text, tmp_path / "plan.toml")
    settings = RunSettings(ROOT, tmp_path / "golden", tmp_path / "artifacts")
    return PlanRun(plan, settings, pools).check(check)


@pytest.mark.parametrize(("ranks", "steps", "of"), [(2, 1, ADAMW), (2, 4, ADAMW), (3, 3, SGD)])
def test_one_step_and_many_are_equal(pools: Pools, tmp_path: Path, ranks: int, steps: int, of: tuple[str, str]) -> None:
    verdict = run(pools, tmp_path, "bitwise", ranks=ranks, steps=steps, of=of)
    assert verdict.outcome == "passed", verdict.lines
    assert f"equal bit for bit on {ranks} ranks in {max(3, steps)} steps" in verdict.summary


SAID = {
    "rate_of_this_call": ("step 0, rank 0: parameter that the next call gave c.weight", "graph steady"),
    "rate_of_the_first_call": ("step 1, rank 0: parameter c.weight", "graph cleanup"),
    "rate_not_copied": ("step 0, rank 0: parameter that the next call gave c.weight", "graph steady"),
    "swapped": ("step 0, rank 0: gradient c.weight", "graph cleanup"),
    "not_updated": ("step 0, rank 0: parameter that the next call gave c.weight", "no node that both graphs have differs"),
    "old_parameter": ("step 1, rank 0: loss", "graph steady"),
    "half_an_update": ("step 0, rank 0: parameter c.weight", "no node that both graphs have differs"),
}


@pytest.mark.parametrize("change", SAID)
def test_what_is_wrong_is_said_and_led_to_its_place(pools: Pools, tmp_path: Path, change: str) -> None:
    verdict = run(pools, tmp_path, "bitwise", change)
    first, place = SAID[change]
    assert verdict.outcome == "failed"
    assert any(line.startswith(first) for line in verdict.lines), verdict.lines
    assert place in verdict.lines[-1]


def test_audit_and_collectives_look_at_the_three_graphs(pools: Pools, tmp_path: Path) -> None:
    assert run(pools, tmp_path, "audit").outcome == "passed"
    assert run(pools, tmp_path, "collectives").outcome == "passed"


def test_what_moves_though_nobody_asked_is_seen(pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "next_iteration", "suites.checks.moved_graphs:moving_more")
    verdict = run(pools, tmp_path, "audit")
    assert verdict.outcome == "failed"
    assert "b.weight is updated in the next call, and no entry of next_iteration has it" in verdict.lines
