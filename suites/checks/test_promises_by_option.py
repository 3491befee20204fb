"""What each option of [bucket] and [overlap] promises: green on a graph that keeps it, red on one that was made without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_fxbucket.checks.promises.expectations import Expectations, promise_of
from pytest_fxbucket.checks.promises.kept import audit
from suites.passes.bucketing import Outcome, passed, world_of

KB = 1 / 1024
CASE = "normed"
OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a cap": (CASE, {"cap_mb": (0.3 * KB,)}, "its launch also carries"),
    "a cap for each entry": (CASE, {"cap_mb": (0.0, 0.3 * KB)}, "entry layers.1, forward all_gather, part 1 of 2"),
    "neighbours by size": (CASE, {"by": "size", "entries": (), "cap_mb": (1.0 * KB,)}, "by size, forward all_gather"),
    "several dtypes in one launch": ("two_dtypes", {"dtypes": "mixed"}, "2 launches, expected 1"),
    "a group of their own": (
        CASE,
        {"gather_group": "own"},
        'does not run on a process group of its own, though gather_group = "own"',
    ),
    "a group of their own in backward": (
        CASE,
        {"gather_group": "backward"},
        'does not run on a process group of its own, though gather_group = "backward"',
    ),
    "a gather by hand": (
        CASE,
        {"launch_at": {"forward": {"layers.2": "layers.0"}}},
        "entry layers.2, forward all_gather is not launched before the compute of layers.0 starts",
    ),
    "a wait by hand": (
        "linears",
        {"wait_before": {"backward": {"layers.3": "layers.0"}}},
        "reduction is not waited for right before the compute of layers.0: layers.1 computes in between",
    ),
    "two ahead": (CASE, {"prefetch": 2}, "prefetch = 2 is not reached"),
    "execution order": ("late", {"layout": "execution"}, "member 0 of the layout"),
}


def promised(case: str, options: dict[str, Any]) -> Expectations:
    world = world_of(case, **options)
    return promise_of(world.plan, world.step(0).parameters, world.resolution)


def problems(case: str, options: dict[str, Any], outcome: Outcome) -> list[str]:
    return audit(promised(case, options), outcome.before, outcome.after)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_graph_that_keeps_an_option_is_green(option: str) -> None:
    case, options, _ = OPTIONS[option]
    assert problems(case, options, passed(case, **options)) == []


@pytest.mark.parametrize("option", OPTIONS)
def test_a_graph_made_without_an_option_is_red_and_names_it(option: str) -> None:
    case, options, words = OPTIONS[option]
    found = problems(case, options, passed(case))
    assert any(words in line for line in found), found


# A wait that stands later than it must is no breach.
@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "a wait by hand"])
def test_a_graph_made_with_an_option_that_the_plan_does_not_ask_for_is_red(option: str) -> None:
    case, options, _ = OPTIONS[option]
    assert problems(case, {}, passed(case, **options)) != []


def test_what_is_gathered_too_early_is_red_for_the_memory_that_it_takes() -> None:
    found = problems("linears", {"prefetch": 1}, passed("linears", prefetch=3))
    assert any("gathered bytes alive" in line and "prefetch = 1 allows" in line for line in found), found


def test_a_product_of_activations_alone_hides_a_gather_as_any_compute_does() -> None:
    outcome, promise = passed(CASE), promised(CASE, {})
    gather = next(one for one in outcome.after.buckets if one.fqns[0].startswith("layers.2"))
    first = min(one.wait or 0 for one in outcome.before.buckets if one.fqns[0] in gather.fqns and one.kind == "all_gather")
    before = replace(outcome.before, products=((first - 1, "forward", "layers.1.weight"),))
    after = replace(outcome.after, products=(((gather.wait or 0) + 1, "forward", "layers.1.weight"),))
    found = audit(promise, before, after)
    assert any(
        "is waited for before layers.1.weight computes, which used to hide it: it is exposed" in line for line in found
    ), found


def test_with_overlap_a_launch_may_be_above_the_cap_if_the_step_had_it_so() -> None:
    outcome, promise = passed(CASE), promised(CASE, {})
    promise = replace(promise, bucket=replace(promise.bucket, by="overlap", cap_mb=(0.3 * KB,)))
    merged = audit(promise, outcome.before, outcome.after)
    assert any("bytes, above cap_mb = 0.000292969" in line for line in merged), merged
    assert audit(promise, outcome.after, outcome.after) == []


def test_a_pack_that_makes_buckets_wait_for_each_other_is_no_excuse_for_lost_overlap() -> None:
    """Gathers and reductions that nothing bound before the pass: that they are bound in its graph exempts none of them."""
    outcome = passed("linears", prefetch=0, defer_reduce=False)
    bound = tuple(replace(b, blocked=b.launch - 1, needed=b.launch + 1) for b in outcome.after.buckets)
    found = audit(promised("linears", {}), outcome.before, replace(outcome.after, buckets=bound))
    assert any("prefetch = 1 is not reached" in line for line in found), found
    assert any("it is not deferred" in line for line in found), found
