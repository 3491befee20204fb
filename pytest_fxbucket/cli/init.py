"""``fxbucket init module:factory``: write a first plan for a model, see whether it passes, and print its module tree."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.common import checking
from pytest_fxbucket.cli.first_entries import BlockNames, Draft, draft
from pytest_fxbucket.cli.first_plan import (
    PlanSource,
    TriedPlan,
    plan_text,
    said_of,
    said_of_overrides,
    said_of_rounding,
    stages_draft,
    tried,
)
from pytest_fxbucket.cli.module_tree import module_tree, said_of_ties
from pytest_fxbucket.cli.written_files import refuse_present, write_new
from pytest_fxbucket.errors import PlanError, UsageError
from pytest_fxbucket.plan import parse_plans
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.schema import rule_of
from pytest_fxbucket.plan.toml_text import from_toml
from pytest_fxbucket.progress import on_stderr
from pytest_fxbucket.user_code import user_code

if TYPE_CHECKING:
    from torch import nn


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket init``."""
    parser.add_argument("factory", metavar="module:factory", nargs="?", help="callable that gives the torch.nn.Module")
    parser.add_argument("--hf", type=Path, metavar="CONFIG", help="instead: a config.json of transformers, or its folder")
    parser.add_argument("--torchtitan", metavar="MODEL", help="instead: a model of torchtitan's registry, such as llama3")
    parser.add_argument("--flavor", metavar="FLAVOR", help="of that model (default: debugmodel)")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="keyword argument of the factory")
    parser.add_argument("--stages", type=int, metavar="N", help="cut the model into N pipeline stages, one on each rank of pp")
    parser.add_argument("--out", type=Path, metavar="FILE", help="plan file to write (default: the module's name)")


def run(options: Namespace) -> int:
    """Build the model, trace its step, write its plan, print its tree; 1 if the plan, which is written, does not pass yet.

    Raises FxbucketError for a model that cannot be built and a file that cannot be written; nothing is written then.
    """
    if options.flavor is not None and options.torchtitan is None:
        raise UsageError("--flavor is of a model of torchtitan: it goes with --torchtitan MODEL")
    if options.hf is not None or options.torchtitan is not None:
        return _of_a_library(options)
    if options.factory is None:
        raise UsageError("the following arguments are required: module:factory, --hf CONFIG or --torchtitan MODEL")
    rule_of("model", "factory").read(options.factory, "the factory")
    if options.stages is not None:
        rule_of("pipeline", "stages").read(options.stages, "--stages")
    module = options.factory.partition(":")[0]
    out: Path = options.out or Path(module.rpartition(".")[2] + ".toml")
    refuse_present(out)
    args = _keyword_arguments(options.arg)
    with redirect_stdout(sys.stderr), user_code([Path.cwd()]):
        factory = import_callable(options.factory, f'factory "{options.factory}"')
        model = _build(factory, options.factory, args)
    found = {
        name: f"{module}:{name}" if callable(getattr(sys.modules[module], name, None)) else None for name in ("batch", "loss")
    }
    source = PlanSource(options.factory, args, found["batch"], found["loss"])
    bucket = draft(model)
    modules = {fqn: type(module) for fqn, module in model.named_modules()}
    parse_plans(plan_text(source, bucket), out)  # what init writes must load
    nbytes = sum(one.numel() * one.itemsize for one in model.parameters())
    lines = [*module_tree(model), "", *said_of_ties(BlockNames.of(model).aliases)]
    missing = [] if source.batch else list(_batch_to_write(source, model, out))
    # The trial builds the model again: of a factory that needs real memory there would be two.
    del model, factory
    result, progress, stages = TriedPlan(source), on_stderr(), None
    if not missing:
        with redirect_stdout(sys.stderr), progress.watching(str(out)):
            result = tried(source, bucket, out, modules, nbytes, progress.say)
    if options.stages is not None:
        with redirect_stdout(sys.stderr), progress.watching(str(out)):
            stages = stages_draft(result.source, bucket, out, options.stages, progress.say)
    write_new(out, plan_text(result.source, bucket, stages))
    staged = said_of(stages) if stages is not None else ()
    for line in [*lines, *_summary(out, result, bucket), *staged, *missing, f"Next: {checking(out)}"]:
        print(line)
    return 1 if missing or result.problem else 0


def _of_a_library(options: Namespace) -> int:
    """Run init for a model that a library describes: transformers with --hf, torchtitan with --torchtitan."""
    if options.hf is not None and options.torchtitan is not None:
        raise UsageError("--hf and --torchtitan are of two models; give one of them")
    option = "--hf" if options.hf is not None else "--torchtitan"
    if options.factory or options.arg or options.stages is not None:
        raise UsageError(f"{option} writes the factory itself: it goes without module:factory, --arg and --stages")
    if options.hf is None:
        from pytest_fxbucket.cli.torchtitan import command as of_torchtitan

        return of_torchtitan.run(options)
    from pytest_fxbucket.cli.hugging_face import command

    return command.run(options)


def _keyword_arguments(pairs: list[str]) -> dict[str, object]:
    args: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f'--arg {pair} is not understood; write KEY=VALUE, as in "--arg layers=4"')
        args[key] = from_toml(value)
    return args


def _build(factory: Callable[..., Any], name: str, args: Mapping[str, object]) -> nn.Module:
    """Build the model without memory for its weights, or with, if the factory looks at values."""
    import torch

    from pytest_fxbucket.capture.refusals import refuse_lazy
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode

    try:
        with FakeTensorMode():
            model = factory(**args)
    except Exception:  # whatever a factory raises on fake tensors, it may be right on real ones
        try:
            model = factory(**args)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise PlanError(f'factory "{name}" raised {said}; arguments are given with --arg') from error
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f'factory "{name}" gave a {type(model).__name__}, where a torch.nn.Module was expected')
    refuse_lazy(model.named_parameters())
    return model


def _summary(out: Path, result: TriedPlan, bucket: Draft) -> Iterator[str]:
    source = result.source
    yield f"Wrote {out}: {bucket}."
    if source.inputs:
        what = "the first item" if source.inputs == (0,) else "what is in the first item"
        yield f"The model is given {what} of a batch, and the loss the rest, as [model] inputs says."
    yield from said_of_overrides(source.overridden)
    yield from said_of_rounding(source.rounds_otherwise)
    if source.loss is None:
        yield "There is no loss beside the factory: the loss in the model's output is used, or the output itself."
    if result.problem:
        yield f"It does not pass yet: {result.problem.sentence.rstrip('.')}."


def _batch_to_write(source: PlanSource, model: nn.Module, out: Path) -> Iterator[str]:
    """Say that there is no batch function, and give one to begin with."""
    import inspect

    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    # What forward cannot do without, or the first of its parameters if all have defaults.
    named = [one for one in parameters if one.kind in kinds]
    names = [one.name for one in named if one.default is one.empty] or [one.name for one in named][:1]
    yield f"There is no batch beside the factory: write {source.placeholder}(rank, step), or name one in {out}. Such as:"
    yield ""
    yield "    def batch(rank, step):"
    yield "        generator = torch.Generator().manual_seed(1000 * step + rank)"
    items = ", ".join(f'"{name}": {_values(name)}' for name in names)
    yield f"        return {{{items}}}"
    yield ""


def _values(name: str) -> str:
    is_index = any(word in name for word in ("ids", "token", "idx"))
    return "torch.randint(100, (4, 16), generator=generator)" if is_index else "torch.randn(4, 16, generator=generator)"
