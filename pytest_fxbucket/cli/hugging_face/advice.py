"""What a person can do about a model of transformers that does not pass, beyond what the sentence of the problem says."""

from __future__ import annotations

import re

from pytest_fxbucket.cli.first_failure import Problem
from pytest_fxbucket.cli.hugging_face.trial import Trial

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_ROUTED = re.compile(r"experts?|moe|router|sparse", re.IGNORECASE)


def way_out(trial: Trial) -> str:
    """A sentence, with a space before it; empty where the problem itself says all."""
    problem, file = trial.problem, trial.written.path.name
    if problem is None:
        return ""
    if problem.looks_at_values and (by := _images_by_values(trial, problem)):
        return f" {by}: leave the images out of draw() of {file}, and the text is traced."
    return _of_module(problem, file)


def _images_by_values(trial: Trial, problem: Problem) -> str:
    """What values say of the images of a batch; empty where they say nothing."""
    if "image_grid_thw" in "".join(trial.written.fed.lines):
        return "The sizes of its images are values (image_grid_thw)"
    return "Which of its images are no padding is told by values" if "get_image_features" in problem.said else ""


def _of_module(problem: Problem, file: str) -> str:
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
    return ""
