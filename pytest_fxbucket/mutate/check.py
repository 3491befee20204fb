"""The check ``mutation``: would the plan's other checks find it if the graph were broken?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.checks.verdict import Verdict, capped, failed, passed
from pytest_fxbucket.mutate.judge import MutantSelection, scored
from pytest_fxbucket.mutate.score import MutationScore, sums, survivor_lines, undecided_lines
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context


def run(context: Context) -> Verdict:
    """Break the graph as often as the plan allows. Raises FxbucketError for a plan that does not pass its other checks."""
    options = context.plan.checks.mutation
    assert options  # the plan has it on
    asked = MutantSelection(seed=options.seed, at_most=options.at_most, seconds=options.budget_s)
    # A score comes after each mutant and counts all so far, so the last one is wanted; without mutants it is the empty one.
    score = [MutationScore((), 0), *scored(context, asked)][-1]
    # Asked first: the share of no mutants is 1.0, and would pass.
    if not score.counted_mutants:
        undecided = [line for one in score.judged for line in undecided_lines(one)]
        return failed(
            "mutation", f"none of {counted(len(score.judged), 'mutant')} shows what the checks find", capped(undecided)
        )
    if score.share < options.min_score:
        lines = [line for one in score.of("survived") for line in survivor_lines(one)]
        what = f"{sums(score)}; at least {100 * options.min_score:g} % by checks.mutation.min_score"
        return failed("mutation", what, capped([*lines, f"fxbucket mutate {context.plan.path} shows each with its graph"]))
    return passed("mutation", sums(score))
