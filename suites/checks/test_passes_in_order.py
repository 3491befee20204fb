"""Passes that are run in order: what each made is what the next is given, and a red check names the first that broke it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.checks.first_red import first_red
from pytest_fxbucket.checks.verdict import Verdict, failed, passed
from pytest_fxbucket.errors import GoldenError, PassError
from pytest_fxbucket.plan.schema_bucket import Passes
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.checks.conftest import MODEL, PLAN

Bitwise = Callable[..., Verdict]
OURS = "passes_in_order"


def in_order(*names: str) -> Passes:
    return Passes(tuple(name if name in ("manual", "torch") else f"{OURS}:{name}" for name in names))


def red(verdict: Verdict, number: int, name: str) -> tuple[str, str]:
    """The graphs before and behind the pass that ``verdict`` names, which is to be that one."""
    assert verdict.outcome == "failed", repr(verdict)
    of = f"behind which {verdict.check} is red is number {number}, {name}; graphs before and behind it: "
    (line,) = (line for line in verdict.lines if of in line)
    assert line.endswith("joint.before.rank0.txt, joint.behind.rank0.txt")
    assert verdict.folder is not None
    assert (verdict.folder / "joint.unbucketed.txt").exists()
    assert not verdict.folder.with_name(f"{verdict.check}.behind").exists(), "what was asked on the way leaves nothing"
    before, behind = ((verdict.folder / f"joint.{of}.rank0.txt").read_text() for of in ("before", "behind"))
    return before, behind


def test_the_second_of_three_breaks_values_and_is_named(bitwise: Bitwise) -> None:
    verdict = bitwise(passes=in_order("manual", "other_tanh", "same"))
    before, behind = red(verdict, 2, "passes_in_order:other_tanh")
    assert "1.00000095" in behind
    assert "1.00000095" not in before
    assert "all_gather_into_tensor" in before


@pytest.mark.parametrize(
    ("check", "second"),
    [("collectives", "without_a_wait"), ("same", "other_tanh"), ("audit", "half_the_reductions")],
)
def test_each_check_names_the_pass_that_broke_it(bitwise: Bitwise, check: str, second: str) -> None:
    before, behind = red(bitwise(check, passes=in_order("manual", second, "same")), 2, f"passes_in_order:{second}")
    assert before != behind


def test_what_the_plan_promises_is_not_asked_of_passes_before_the_one_that_buckets(bitwise: Bitwise) -> None:
    verdict = bitwise("audit", passes=in_order("same", "manual", "half_the_reductions"))
    red(verdict, 3, "passes_in_order:half_the_reductions")


def test_passes_of_which_none_does_what_is_asked_are_none_of_them_named(bitwise: Bitwise) -> None:
    verdict = bitwise("audit", passes=in_order("same", "same"))
    assert verdict.lines[-1] == (
        "audit is red before the first of the 2 passes already, and says the same: none of them mends it"
    )


@pytest.mark.parametrize("check", ["audit", "collectives", "same", "bitwise"])
def test_three_passes_that_are_right_are_green(bitwise: Bitwise, check: str) -> None:
    assert bitwise(check, passes=in_order("same", "manual", "same")), "ours buckets what another pass made"


def test_the_option_takes_the_place_of_the_plans_list(bitwise: Bitwise) -> None:
    passes = in_order("manual", "other_tanh")
    assert bitwise("same", passes=passes, settings={"pass_name": "manual"})
    verdict = bitwise("same", settings={"pass_name": "manual, passes_in_order:other_tanh"})
    red(verdict, 2, "passes_in_order:other_tanh")


def test_one_pass_alone_is_not_looked_for(bitwise: Bitwise) -> None:
    verdict = bitwise("same", settings={"pass_name": "passes_in_order:other_tanh"})
    assert verdict.outcome == "failed"
    assert "behind which" not in "\n".join(verdict.lines)


def test_a_graph_that_cannot_be_read_names_its_pass(bitwise: Bitwise) -> None:
    with pytest.raises(PassError, match=r"^behind pass passes_in_order:unreadable, number 2 of 3: the graph cannot be run: "):
        bitwise("same", passes=in_order("manual", "unreadable", "same"))


def test_a_golden_may_be_written_by_the_plans_own_passes_alone(pools: Pools, tmp_path: Path) -> None:
    plan, written = replace(PLAN, model=MODEL, passes=in_order("manual", "same")), list[Path]()
    own = RunSettings(plan.path.parent, tmp_path / "golden", tmp_path / "artifacts", accept="new")

    def golden(settings: RunSettings) -> Verdict:
        return PlanRun(plan, settings, pools, accept_golden=lambda path, text: written.append(path)).check("golden")

    with pytest.raises(GoldenError, match="is missing"):
        golden(replace(own, pass_name="manual"))
    assert written == []
    assert golden(own)
    assert len(written) == 1


# Which pass is named, told from verdicts.


def reds(*lines: str) -> Verdict:
    return failed("audit", "red", list(lines)) if lines else passed("audit", "green")


@pytest.mark.parametrize(
    ("behind", "final", "number"),
    [
        ([reds(), reds(), reds("x")], reds("x"), 2),
        ([reds(), reds(), reds()], reds("x"), 3),
        ([reds(), reds("y"), reds("x")], reds("x"), 1),
        ([reds("a"), reds("a", "x"), reds("x")], reds("x"), 1),
        ([reds("a"), reds("a"), reds()], reds("a", "x"), 3),
        ([reds("a"), reds("a"), reds("a")], reds("a"), 0),
        ([reds(), replace(reds(), outcome="skipped"), reds("x")], reds("x"), 2),
    ],
)
def test_the_first_is_told_from_what_is_said_behind_each(behind: list[Verdict], final: Verdict, number: int) -> None:
    assert first_red(3, final, behind.__getitem__) == number
