"""Each operator on communication breaks real graphs, at every rank alike or at one, and some check of the plan finds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.mutate.mutant import Mutant
from pytest_fxbucket.ranks.pools import Pools
from suites.mutate.broken_plans import ROOT, BrokenPlan, digests, targets
from suites.mutate.updated_first import PLAN

FOUND: dict[str, tuple[str, str, str]] = {
    "branch_on_the_rank": ("hybrid", "same", "first differs at"),
    "deferral_lost": ("hybrid", "audit", "it is not deferred"),
    "divisor_changed": ("hybrid", "same", "first differs at"),
    "gather_forgotten_on_a_rank": ("split", "collectives", "never does"),
    "gather_kept": ("uneven", "audit", "backward all_gather"),
    "gather_stale": ("updated_first", "same", "first differs at"),
    "group_other": ("hybrid", "audit", "another process group"),
    "group_twin": ("uneven", "audit", "another process group"),
    "launch_advanced": ("uneven", "audit", "earlier than prefetch"),
    "launch_delayed": ("hybrid", "audit", "it is not deferred"),
    "launch_doubled": ("uneven", "audit", "launch"),
    "launch_dropped": ("split", "same", "first differs at"),
    "launches_swapped": ("hybrid", "audit", "launched"),
    "members_swapped": ("hybrid", "audit", "layout"),
    "offset_shifted": ("placed", "same", "first differs at"),
    "op_other": ("uneven", "same", "which gives"),
    "order_on_a_rank": ("hybrid", "collectives", "differs"),
    "order_dependency_lost": ("buckets::deps", "audit", "as insert_overlap_deps promises"),
    "padding_leaks": ("uneven", "same", "first differs at"),
    "prefetch_lost": ("uneven", "audit", "prefetch = 1 is not reached"),
    "read_before_wait": ("uneven", "collectives", "without waiting"),
    "view_changed": ("uneven", "same", "first differs at"),
    "wait_advanced": ("uneven", "audit", "prefetch = 1 is not reached"),
    "wait_delayed": ("uneven", "golden", "what changed"),
    "wait_doubled": ("uneven", "collectives", "2 times, expected once"),
    "wire_dtype": ("placed", "audit", "launched in bfloat16"),
    "write_in_flight": ("uneven", "collectives", "writes to a buffer"),
}
"""By operator: a plan, a check that finds one of its first mutants there, and what that says of it."""
PLANS = ("hybrid", "uneven", "buckets::deps")
ONLY_IN = {
    "gather_kept": ("hybrid", "uneven"),
    "gather_stale": ("updated_first",),
    "group_other": ("hybrid",),
    "order_dependency_lost": ("buckets::deps",),
    "padding_leaks": ("uneven",),
}
"""Plans of those operators that do not have places in all of PLANS."""
PLACES = [(operator, plan) for operator in sorted(FOUND) for plan in ONLY_IN.get(operator, PLANS)]
_TRIED = 6
"""Mutants of an operator that a check is asked of until it finds one."""

Plans = Callable[[str], BrokenPlan]


@pytest.fixture(scope="module")
def plans(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Each plan once."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "updated_first.toml").write_text(PLAN)

    @cache
    def plan(name: str) -> BrokenPlan:
        file, colons, row = name.partition("::")
        where = folder if name == "updated_first" else ROOT / "fixtures" / "plans"
        return BrokenPlan(f"{where / file}.toml{colons}{row}", pools, folder / "artifacts")

    return plan


@pytest.mark.parametrize(("operator", "plan"), PLACES)
def test_it_breaks_the_place_that_it_names_and_no_other_rank_nor_node(plans: Plans, operator: str, plan: str) -> None:
    mutants = plans(plan).mutants(operator)
    assert mutants, f"{operator} has no place in {plan}"
    for mutant in (mutants[0], mutants[-1]):
        _is_broken_at_its_place_alone(plans(plan), mutant)


def _is_broken_at_its_place_alone(plan: BrokenPlan, mutant: Mutant) -> None:
    before, after, again = plan.world, plan.broken(mutant), plan.broken(mutant)
    rank = 0 if mutant.site.on_rank is None else mutant.site.on_rank
    other = next(one for one in range(before.size) if one != rank)
    assert digests(after, rank) != digests(before, rank), f"{mutant.name} changes nothing"
    assert digests(after, rank) == digests(again, rank), f"{mutant.name} is another one each time"
    of_other = digests(before, other) if mutant.site.on_rank is not None else digests(after, rank)
    assert digests(after, other) == of_other, f"{mutant.name} is not on the ranks that it names"
    old, new = targets(before, rank), targets(after, rank)
    assert {name: old[name] for name in new if name in old} == {name: new[name] for name in new if name in old}


@pytest.mark.parametrize(("plan", "check"), sorted({(plan, check) for plan, check, _ in FOUND.values()}))
def test_the_graph_as_it_is_passes(plans: Plans, plan: str, check: str) -> None:
    assert plans(plan).said(check)


@pytest.mark.parametrize("operator", sorted(FOUND))
def test_what_it_breaks_is_found(plans: Plans, operator: str) -> None:
    name, check, words = FOUND[operator]
    plan, said = plans(name), []
    mutants = plan.mutants(operator)
    assert mutants, f"{operator} has no place in {name}"
    for mutant in mutants[:_TRIED]:
        try:
            verdict = plan.said(check, mutant)
        except FxbucketError as error:
            said.append(str(error))
            continue
        said.append(repr(verdict))
        if verdict.outcome == "failed" and any(words in line for line in verdict.lines):
            return
    pytest.fail("\n".join([f"{check} of {name} says nothing of {operator}:", *said]))


def test_mutants_come_in_the_same_order_each_time(plans: Plans) -> None:
    first, second = (plans("uneven").mutants("launch_dropped") for _ in range(2))
    assert [one.name for one in first] == [one.name for one in second]
    assert len({(one.name, one.site.how) for one in first}) == len(first)
