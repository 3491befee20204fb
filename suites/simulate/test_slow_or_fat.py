"""Plans and passes that are right but slow or fat: each turns ``overlap`` or ``memory`` red, with the bucket and the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.plans.llama import MIXED, llama
from suites.simulate import slow_or_fat

ROOT = Path(__file__).parents[2]
TEXT = (
    llama("layers = 3, dim = 64", 4, **MIXED)
    + """
[cluster]
tflops = { float32 = 0.1 }
memory_bandwidth = 10
memory_gb = 16
devices_per_node = 8
within = { bandwidth = 0.45, latency_us = 1 }
between = { bandwidth = 0.45, latency_us = 1 }
kernel_us = 10
collective_us = 20

[checks]
overlap = { exposed_max_ms = 0.4 }
memory = { increase_max = 0.67 }
"""
)
OPTIMIZER = """
[[optimizer]]
factory = "torch.optim:SGD"
args = { lr = 0.1 }
"""
"""What it updates together hangs on all of the bucket: without one, plans share a captured step."""
LATE, EARLY = "launched too late, what it sends was there before", "waited for too early, what it brings is read later"
LITTLE = "too little compute runs beside it"
FLIES = " is in flight before it"
PLANS = {
    "overlap.prefetch = 0": (
        "overlap",
        "forward all_gather layers.1",
        LATE,
        "what exposes most is launched too late; what helps: a larger [overlap] prefetch, or launch_at by hand",
    ),
    "overlap.defer_reduce = false": (
        "overlap",
        "backward reduce_scatter layers.1",
        EARLY,
        "what exposes most is waited for too early; what helps: defer_reduce = true",
    ),
    'bucket.plan = []\nbucket.unplanned = "root"': (
        "overlap",
        "backward reduce_scatter root",
        LITTLE,
        "what exposes most is too little compute; what helps: more compute in front of its wait",
    ),
    "overlap.prefetch = 8": (
        "memory",
        "backward all_gather layers.0",
        "gathered",
        "at most 67 % by checks.memory.increase_max",
    ),
}
"""Keys that are right and cost time or memory: the item that is red, the bucket and reason it names, and what it says."""
PASSES = {
    "gather_waited_for_early": ("overlap", "forward all_gather layers.2", EARLY),
    "gather_of_the_last_layer_first": ("overlap", "forward all_gather layers.0", f"forward all_gather layers.2{FLIES}"),
    "gathered_again_for_one_reader": ("overlap", "forward all_gather layers.1 #2", LATE),
    "reductions_behind_the_optimizer": ("overlap", "backward reduce_scatter layers.2", LATE),
    "packs_copied_twice": ("memory", "backward reduce_scatter layers.2", "communication"),
    "gathers_kept": ("memory", "forward all_gather layers.0", "gathered"),
}
"""The same of passes, by name."""

Ask = Callable[..., Verdict]


@pytest.fixture
def ask(pools: Pools, tmp_path: Path, last_step: LastStep, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Asks some checks, the good plan's if nothing is changed; all ranks do the same, and one is looked at."""
    monkeypatch.setattr(PlanOnMesh, "ranks", lambda _: range(1))

    def run(*checks: str, change: str = "", spoil: str = "") -> list[Verdict]:
        rest = f'[[matrix]]\nid = "changed"\n{change}\n' if change else OPTIMIZER * bool(spoil)
        plan = parse_plans(TEXT + rest, ROOT / "p.toml")[-1]
        name = f"{slow_or_fat.__name__}:{spoil}" if spoil else "manual"
        settings = RunSettings(ROOT, tmp_path / "golden", tmp_path / "artifacts", pass_name=name)
        run = PlanRun(plan, settings, pools, last_step=last_step)
        return [run.check(check) for check in checks]

    return run


def names(verdict: Verdict, bucket: str, reason: str) -> bool:
    """Whether ``verdict`` says that ``bucket`` is exposed for ``reason``, or holds much of what lives, ``reason`` among it."""
    if verdict.check == "overlap":
        return any(re.fullmatch(rf"  {re.escape(bucket)}: .* in flight: {re.escape(reason)}", line) for line in verdict.lines)
    return any(line.startswith(f"  bucket {bucket}: ") for line in verdict.lines) and any(
        line.startswith(f"  {reason}") for line in verdict.lines
    )


def test_the_good_plan_is_within_its_limits(ask: Ask) -> None:
    for spoil in ("", "untouched"):  # without an optimizer, and with one
        assert [verdict.lines for verdict in ask("overlap", "memory", spoil=spoil) if not verdict] == []


@pytest.mark.parametrize("change", PLANS)
def test_a_plan_that_is_slow_or_fat_is_red_where_audit_is_green(ask: Ask, change: str) -> None:
    item, bucket, reason, says = PLANS[change]
    found, audit, same = ask(item, "audit", "same", change=change)
    assert (found.outcome, bool(audit), bool(same)) == ("failed", True, True), found.summary
    assert names(found, bucket, reason), found
    assert says in "\n".join(found.lines)


@pytest.mark.parametrize("spoil", PASSES)
def test_a_pass_that_is_slow_or_fat_is_red_though_its_graph_is_right(ask: Ask, spoil: str) -> None:
    item, bucket, reason = PASSES[spoil]
    found, same = ask(item, "same", spoil=spoil)
    assert (found.outcome, bool(same)) == ("failed", True), found.summary
    assert names(found, bucket, reason), found
