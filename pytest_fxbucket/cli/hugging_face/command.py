"""``fxbucket init --hf CONFIG``: from a configuration to a module, a plan, and whether that passes."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.cli.common import checking
from pytest_fxbucket.cli.first_entries import BlockNames, draft
from pytest_fxbucket.cli.first_plan import said_of_overrides, said_of_rounding
from pytest_fxbucket.cli.hugging_face.module_and_plan import HfPlan, module_text, plan_text
from pytest_fxbucket.cli.hugging_face.read_config import described_by
from pytest_fxbucket.cli.hugging_face.rehearsal import loaded, may_be_idle, rehearsed
from pytest_fxbucket.cli.hugging_face.trial import TrialPlan, tried, way_out
from pytest_fxbucket.cli.module_tree import module_tree, said_of_ties
from pytest_fxbucket.cli.written_files import module_beside, write_new
from pytest_fxbucket.progress import on_stderr
from pytest_fxbucket.user_code import user_code

if TYPE_CHECKING:
    from torch import nn


def run(options: Namespace) -> int:
    """Write the module and the plan, print the real size's module tree; 1 if the plan, which is written, does not pass yet.

    Raises FxbucketError for a configuration that cannot be read, a model that makes no step, a file that cannot be written;
    nothing is written then.
    """
    from pytest_fxbucket.compat.tracing import quiet

    described = described_by(options.hf)
    kind = re.sub(r"\W", "_", str(described.config.model_type))
    out: Path = options.out or Path(f"hf_{kind}.toml")
    path = module_beside(out)
    progress = on_stderr()
    with ExitStack() as inside:
        inside.enter_context(redirect_stdout(sys.stderr))
        inside.enter_context(user_code([Path.cwd()]))
        inside.enter_context(quiet("transformers"))  # it says something of every configuration
        inside.enter_context(progress.watching(str(out)))
        progress.say("making a step of the small size")
        small = rehearsed(described, path)
        progress.say("building the real size without memory")
        with loaded(small.written) as module:
            model: nn.Module = module.build()
        lines, names = list(module_tree(model)), BlockNames.of(model)
        modules = {fqn: type(module) for fqn, module in model.named_modules()}
        idle = may_be_idle(model, small.idle)
        plan = HfPlan(path.stem, described.model_class.__name__, draft(model).of_any_depth(modules), names.aliases, idle)
        plan = replace(plan, param_dtype=_half(described.config.dtype))
        del model
        trial = tried(small.written, plan, out, modules, progress.say)
    write_new(path, module_text(trial.written))
    write_new(out, plan_text(trial.plan))
    for line in [*lines, "", *_summary(trial, out)]:
        print(line)
    return 1 if trial.problem else 0


def _half(dtype: object) -> str | None:
    """The dtype of the weights in a configuration, if it is bfloat16 or float16."""
    name = str(dtype).removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else None


def _summary(trial: TrialPlan, out: Path) -> Iterator[str]:
    plan = trial.plan
    yield from said_of_ties(plan.ties)
    yield f"Wrote {trial.written.path} and {out}: {plan.bucket}."
    if plan.may_be_idle:
        yield f"Gradients that may be zero: {', '.join(plan.may_be_idle)}, as [model] may_be_idle says."
    yield from said_of_overrides(plan.overridden)
    if trial.written.drops_nothing:
        file = trial.written.path
        yield f"Dropout is 0, by ALWAYS of {file}: what is overridden is called again in backward, and would draw anew."
    if not trial.written.fed.gives_loss:
        yield f"The model makes no loss of its batch that can be traced: loss() of {trial.written.path} is to be yours."
    yield from said_of_rounding(plan.rounds_otherwise)
    if trial.written.eager_attention:
        yield 'Attention is "eager" in the real size, too: the model\'s own default cannot be traced.'
    if trial.problem:
        yield f"It does not pass yet, in the {trial.problem.where} size: {trial.problem.sentence.rstrip('.')}.{way_out(trial)}"
    yield f"Next: {checking(out)}"
