"""``fxbucket init --torchtitan MODEL``: from torchtitan's registry to a module, a plan, and whether that passes."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.common import checking
from pytest_fxbucket.cli.first_entries import BlockNames, Draft, draft
from pytest_fxbucket.cli.first_plan import PlanProblem, changed_until_right, first_failure, said_of_overrides
from pytest_fxbucket.cli.module_tree import module_tree, said_of_ties
from pytest_fxbucket.cli.torchtitan.module_and_plan import TitanModule, TitanPlan, module_text, plan_text
from pytest_fxbucket.cli.torchtitan.registry import ChosenModel, chosen
from pytest_fxbucket.cli.written_files import laid_out, loaded, module_beside, write_new
from pytest_fxbucket.errors import named
from pytest_fxbucket.plan import PlanError, parse_entries, parse_plans, resolve
from pytest_fxbucket.progress import on_stderr
from pytest_fxbucket.user_code import user_code

if TYPE_CHECKING:
    from torch import nn


def run(options: Namespace) -> int:
    """Write the module and the plan, print the flavor's module tree; 1 if the plan, which is written, does not pass yet.

    Raises FxbucketError for a model that torchtitan does not have or that is no model of tokens, and a file that cannot be
    written; nothing is written then.
    """
    out: Path = options.out or Path(f"titan_{re.sub(r'[^A-Za-z0-9_]', '_', options.torchtitan)}.toml")
    path = module_beside(out)
    progress = on_stderr()
    with redirect_stdout(sys.stderr), user_code([Path.cwd()]), progress.watching(str(out)):
        found = chosen(options.torchtitan, options.flavor or "debugmodel")
        model = found.built(found.flavor)
        lines = list(module_tree(model))
        modules = {fqn: type(module) for fqn, module in model.named_modules()}
        has_experts = any(one.__name__ == "GroupedExperts" for one in modules.values())
        text = module_text(TitanModule(path.stem, found, _in_toolkit(found.name), has_experts))
        with loaded(path.stem, lambda _: text) as module:
            job = module.config()
        bucket, is_torchtitans = _bucket(model, found.name)
        again = {flavor: _checkpointed(found.built(flavor), job) for flavor in dict.fromkeys((found.flavor, found.small))}
        plan = TitanPlan(path.stem, found, job, bucket.of_any_depth(modules), BlockNames.of(model).aliases, again)
        plan, problem = _tried(plan, text, out, modules, progress.say)
    write_new(path, text)
    write_new(out, plan_text(plan))
    for line in [*lines, "", *_summary(plan, problem, path, out, is_torchtitans)]:
        print(line)
    return 1 if problem else 0


def _in_toolkit(name: str) -> bool:
    from torchtitan.experiments import _supported_experiments  # type: ignore[import-not-found]  # an extra

    return f"compiler_toolkit.{name}" in _supported_experiments


def _bucket(model: nn.Module, name: str) -> tuple[Draft, bool]:
    """torchtitan's own buckets and True; else ours and False: if it has none, or plans a tied parameter twice."""
    from torchtitan.experiments.simple_fsdp.llama3.parallelize import (  # type: ignore[import-not-found]  # an extra
        get_transformer_block_buckets,
    )

    names = BlockNames.of(model)
    try:
        listed = get_transformer_block_buckets(model)
        entries = ["+".join(one) if isinstance(one, list) else str(one) for one in listed]
        resolve(parse_entries(entries, f"buckets of {name}"), names.names, names.modules, aliases=names.names)
    except (AttributeError, PlanError):
        # AttributeError: that function asks for the modules of a Llama by name, which this model may not have.
        return draft(model), False
    return Draft(tuple(_ranges(entries))), True


def _ranges(entries: list[str]) -> Iterator[str]:
    """``layers.0`` and so on as one range, where the first of them stands."""
    layers = [entry for entry in entries if re.fullmatch(r"layers\.\d+", entry)]
    in_order = [f"layers.{number}" for number in range(len(layers))]
    for entry in entries:
        if layers != in_order or len(layers) < 2 or entry not in layers:
            yield entry
        elif entry == layers[0]:
            yield f"layers.[0-{len(layers) - 1}]"


def _checkpointed(model: nn.Module, job: Any) -> tuple[str, ...]:
    """Layers of ``model`` that torchtitan's own function wraps."""
    from torchtitan.distributed import activation_checkpoint  # type: ignore[import-not-found]  # an extra

    activation_checkpoint._layer_sac_count = 0  # as in a process that has one model
    activation_checkpoint.apply_ac(
        model, job.activation_checkpoint, model_compile_enabled=False, op_sac_save_list=set(), base_folder=""
    )
    return tuple(fqn for fqn, module in model.named_modules() if type(module).__name__ == "CheckpointWrapper")


def _tried(
    plan: TitanPlan, text: str, out: Path, modules: Mapping[str, type], say: Callable[[str], None]
) -> tuple[TitanPlan, PlanProblem | None]:
    """``plan`` with overrides of some of ``modules``, if that is what it needs to pass; and what is still wrong with it."""

    def overriding(now: TitanPlan, problem: PlanProblem) -> TitanPlan | None:
        selector = problem.to_override(modules, now.overridden)
        return replace(now, overridden=(*now.overridden, selector)) if selector else None

    return changed_until_right(plan, lambda now: _problem(now, text, out, say), overriding)


def _problem(plan: TitanPlan, text: str, out: Path, say: Callable[[str], None]) -> PlanProblem | None:
    """What is wrong, with the small flavor first, which ranks run: a step of it is made on this machine."""
    found = plan.chosen
    with laid_out(out.stem, lambda _: text) as folder:
        *_, small = plans = parse_plans(plan_text(plan), folder / out.name)
        say(f"making a step of {found.small}")
        if problem := _stops(folder, out.stem, found):
            return problem
        # If ranks run the flavor itself there is one plan, and here one item.
        for flavor, one in {found.small: small, found.flavor: plans[0]}.items():
            if problem := first_failure(one, ("audit", "collectives"), say):
                return problem.of_size(flavor, folder)
    return None


def _stops(folder: Path, name: str, found: ChosenModel) -> PlanProblem | None:
    """Why a step of the small flavor cannot be made by ordinary code; None if it can."""
    import importlib

    import torch

    module = importlib.import_module(name)
    torch.manual_seed(0)
    model: nn.Module = module.build(found.small)
    batch, inside = module.batch(0, 0, found.small), list[str]()

    def leave(*_: object) -> None:  # a hook that gives something replaces the output
        inside.pop()

    # ``inside`` is the stack of modules whose forward runs, so its top is where an error was raised.
    for fqn, each in model.named_modules():
        each.register_forward_pre_hook(lambda *_, fqn=fqn: inside.append(fqn))
        each.register_forward_hook(leave)
    try:
        module.loss(model(batch["tokens"]), batch).backward()
    except Exception as error:  # whatever a model raises on a machine that lacks what it needs
        where = f"module {inside[-1]} of a step on this machine" if inside else "a step on this machine"
        return PlanProblem(f"{where} raised {named(error)}", where=found.small)
    return None


def _summary(plan: TitanPlan, problem: PlanProblem | None, path: Path, out: Path, is_torchtitans: bool) -> Iterator[str]:
    yield from said_of_ties(plan.ties)
    whose = "torchtitan's own buckets" if is_torchtitans else "blocks of the model"
    yield f"Wrote {path} and {out}: {', '.join(plan.bucket.entries)}, {whose}."
    yield from said_of_overrides(plan.overridden)
    if not plan.has_trainer:
        yield "The item eager is beside torch's own step: torchtitan's units shard the tied parameter twice, and so part it."
    if problem:
        yield f"It does not pass yet, in the flavor {problem.where}: {problem.sentence.rstrip('.')}."
    yield f"Next: {checking(out)}"
