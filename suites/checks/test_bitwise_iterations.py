"""Bitwise of steps whose work crosses iterations, on real ranks: equal for one step and for many, red for what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap, Transform
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.plan.schema_model import Optimizer, Parallel
from pytest_fxbucket.transforms.registry import BUILT_IN

ADAMW = Optimizer("torch.optim:AdamW", {"lr": 0.01, "fused": True}, groups="entry")
SGD = Optimizer("torch.optim:SGD", {"lr": 0.1, "momentum": 0.9}, groups="entry")
Moved = Callable[..., Verdict]


@pytest.fixture
def moved(bitwise: Callable[..., Verdict]) -> Moved:
    """Run a check of a step of which the last two entries are updated a call late; ``change`` breaks it."""

    def run(check: str, change: str = "", ranks: int = 2, steps: int = 3, optimizer: Optimizer = ADAMW) -> Verdict:
        broken = Transform("suites.checks.moved_graphs:broken_iteration", {"entries": ["c", "d"], "change": change})
        return bitwise(
            check,
            model={"factory": "bitwise_models:build_stack"},
            parallel=Parallel(dp_shard=ranks),
            optimizer=(optimizer,),
            bucket=Bucket(plan=parse_entries(["a", "b", "c", "d"], "test")),
            overlap=Overlap(updates="ready"),
            run=Run(steps=steps, timeout_s=60),
            transform=(broken if change else Transform("next_iteration", {"entries": ["c", "d"]}),),
        )

    return run


@pytest.mark.parametrize(("ranks", "steps", "optimizer"), [(2, 1, ADAMW), (3, 4, SGD)])
def test_one_step_and_many_are_equal(moved: Moved, ranks: int, steps: int, optimizer: Optimizer) -> None:
    verdict = moved("bitwise", ranks=ranks, steps=steps, optimizer=optimizer)
    assert verdict.outcome == "passed", verdict.lines
    assert f"equal bit for bit on {ranks} ranks in {max(3, steps)} steps" in verdict.summary


SAID = {
    "rate_of_the_first_call": ("step 1, rank 0: parameter c.weight", "graph cleanup"),
    "rate_not_copied": ("step 0, rank 0: parameter that the next call gave c.weight", "graph steady"),
    "not_updated": ("step 0, rank 0: parameter that the next call gave c.weight", "no node that both graphs have differs"),
    "old_parameter": ("step 1, rank 0: loss", "graph steady"),
}


@pytest.mark.parametrize("change", SAID)
def test_what_is_wrong_is_said_and_led_to_its_place(moved: Moved, change: str) -> None:
    verdict = moved("bitwise", change)
    first, place = SAID[change]
    assert verdict.outcome == "failed"
    assert any(line.startswith(first) for line in verdict.lines), verdict.lines
    assert place in verdict.lines[-1]


def test_audit_and_collectives_look_at_the_three_graphs(moved: Moved) -> None:
    assert moved("audit").outcome == "passed"
    assert moved("collectives").outcome == "passed"


def test_what_moves_though_nobody_asked_is_seen(moved: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "next_iteration", "suites.checks.moved_graphs:moving_more")
    verdict = moved("audit")
    assert verdict.outcome == "failed"
    assert "b.weight is updated in the next call, and no entry of next_iteration has it" in verdict.lines
