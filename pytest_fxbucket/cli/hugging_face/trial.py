"""Does the plan pass? Both sizes are traced, and the pass is run and checked as by pytest, with ranks that are threads.

If not, changes of the plan and the module are tried; a problem that is left is told, with the way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_fxbucket.cli.first_plan import PlanProblem, changed_until_right, first_failure
from pytest_fxbucket.cli.hugging_face.module_and_plan import HfPlan, Written, plan_text, without_dropout
from pytest_fxbucket.cli.hugging_face.rehearsal import laid_out
from pytest_fxbucket.cli.hugging_face.small import merged
from pytest_fxbucket.plan import parse_plans

# In both errors that a capture has for an operator that is given two dtypes.
_TWO_DTYPES = "which torch refuses"


@dataclass(frozen=True)
class TrialPlan:
    """Module and plan, and what is still wrong with them."""

    written: Written
    plan: HfPlan
    problem: PlanProblem | None = None
    """A problem that is left, in the small size or the real one."""


def tried(written: Written, plan: HfPlan, out: Path, modules: Mapping[str, type], say: Callable[[str], None]) -> TrialPlan:
    """``written`` and ``plan`` with what they need to pass: overrides of some of ``modules``, other attention, other dtypes."""
    # One change a round: an override of the module that looks at values, unless blocks are in it; one dtype where torch refuses
    # two; reasons for which torch rounds otherwise; plain attention in the real size, which the small one has anyway.

    def changed(now: tuple[Written, HfPlan], problem: PlanProblem) -> tuple[Written, HfPlan] | None:
        written, plan = now
        selector = problem.to_override(modules, plan.overridden)
        if selector and not _holds_an_entry(problem.module, plan):
            return _dropping_nothing(written), replace(plan, overridden=(*plan.overridden, selector))
        if _TWO_DTYPES in problem.sentence and plan.param_dtype:
            return written, replace(plan, param_dtype=None)
        if problem.by_design:
            return written, replace(plan, rounds_otherwise=(*plan.rounds_otherwise, *problem.by_design))
        if problem.where == "real" and not written.eager_attention:
            return replace(written, eager_attention=True), plan
        return None

    (written, plan), problem = changed_until_right((written, plan), lambda now: _problem(*now, out, say), changed)
    if problem and problem.looks_at_values and _holds_an_entry(problem.module, plan):
        problem = around_blocks(problem)
    return TrialPlan(written, plan, problem)


def around_blocks(problem: PlanProblem) -> PlanProblem:
    """``problem`` of a module with blocks in it, of which an override would leave nothing to bucket."""
    looked = problem.sentence.partition("; [[override]]")[0]
    return replace(problem, sentence=f"{looked}; an override of {problem.module} would leave nothing of its blocks to bucket")


def _dropping_nothing(written: Written) -> Written:
    changes = without_dropout(written.described.values)
    return replace(written, always=merged(written.always, changes), drops_nothing=True) if changes else written


def _holds_an_entry(module: str, plan: HfPlan) -> bool:
    """Whether blocks of the model are in ``module``: called as it is, it would leave nothing of them to bucket."""
    names = (name for entry in plan.bucket.entries for name in entry.split("+"))
    return any(name.startswith(f"{module}.") for name in names)


def _problem(written: Written, plan: HfPlan, out: Path, say: Callable[[str], None]) -> PlanProblem | None:
    """What is wrong, with the small size first, which takes less time."""
    with laid_out(written) as folder:
        real, small = parse_plans(plan_text(plan), folder / out.name)
        for size, one, checks in (("small", small, ("audit", "eager")), ("real", real, ("audit", "collectives"))):
            if problem := first_failure(one, checks, say):
                return problem.of_size(size, folder)
    return None


_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_ROUTED = re.compile(r"experts?|moe|router|sparse", re.IGNORECASE)


def way_out(trial: TrialPlan) -> str:
    """A sentence, with a space before it; empty where the problem itself says all."""
    problem, file = trial.problem, trial.written.path.name
    if problem is None:
        return ""
    if problem.looks_at_values and (by := _images_by_values(trial, problem)):
        return f" {by}: leave the images out of draw() of {file}, and the text is traced."
    return _of_module(problem, trial.plan, file)


def _images_by_values(trial: TrialPlan, problem: PlanProblem) -> str:
    """What about the images of a batch is told by values; empty if nothing is."""
    if "image_grid_thw" in "".join(trial.written.fed.lines):
        return "The sizes of its images are values (image_grid_thw)"
    return "Which of its images are no padding is told by values" if "get_image_features" in problem.sentence else ""


def _of_module(problem: PlanProblem, plan: HfPlan, file: str) -> str:
    last = problem.module.rpartition(".")[2]
    if problem.module and _ATTENTION.search(last):
        return (
            f' Attention was "eager" here: attn_implementation = "sdpa" in build() of {file} may be traced, with the back end '
            "MATH of torch.nn.attention.sdpa_kernel."
        )
    if problem.looks_at_values and _ROUTED.search(last):
        return (
            f' Experts are chosen by values here: experts_implementation = "batched_mm" in build() of {file} chooses them '
            "without, where the model has it; so does a router of your own with fixed places."
        )
    if problem.looks_at_values and _holds_an_entry(problem.module, plan):
        return f" Let build() of {file} make a constant of what it looks at, or give the blocks alone."
    return ""
