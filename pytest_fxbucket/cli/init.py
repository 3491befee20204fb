"""``fxbucket init module:factory``: write a first plan for a model and print its module tree."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.blocks import Draft, Names, draft
from pytest_fxbucket.cli.toml_text import from_toml, to_toml
from pytest_fxbucket.cli.tree import tree
from pytest_fxbucket.errors import FxbucketError, PlanError, UsageError
from pytest_fxbucket.plan import parse_plans
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.schema import rule_of
from pytest_fxbucket.user_code import user_code

if TYPE_CHECKING:
    from torch import nn

_RANKS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """The ``[model]`` of a first plan; ``batch`` and ``loss`` are None where nothing of that name was found."""

    factory: str
    args: Mapping[str, object]
    batch: str | None
    loss: str | None


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket init``."""
    parser.add_argument("factory", metavar="module:factory", help="callable that gives the torch.nn.Module")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="keyword argument of the factory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="plan file to write (default: the module's name)")


def run(options: Namespace) -> int:
    """Build the model, write its plan, print its tree; raises FxbucketError, and then nothing is written."""
    rule_of("model", "factory").read(options.factory, "the factory")
    module = options.factory.partition(":")[0]
    out: Path = options.out or Path(module.rpartition(".")[2] + ".toml")
    if out.exists():
        raise UsageError(f"{out} is already there and is left as it is; name another file with --out, or remove it")
    args = _keyword_arguments(options.arg)
    with user_code([Path.cwd()]):
        factory = import_callable(options.factory, f'factory "{options.factory}"')
        model = _build(factory, options.factory, args)
    found = {
        name: f"{module}:{name}" if callable(getattr(sys.modules[module], name, None)) else None for name in ("batch", "loss")
    }
    source = Source(options.factory, args, found["batch"], found["loss"])
    bucket = draft(model)
    text = "\n".join(_plan_lines(source, bucket)) + "\n"
    parse_plans(text, out)  # what init writes must load
    _write(out, text)
    for line in [*tree(model), "", *_ties(model), *_summary(out, source, bucket)]:
        print(line)
    return 0


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
    return model


def _plan_lines(source: Source, bucket: Draft) -> Iterator[str]:
    yield "[model]"
    yield f"factory = {to_toml(source.factory)}"
    if source.args:
        yield f"args = {to_toml(source.args)}"
    if source.batch is None:
        yield "# To be written: callable(rank, step) -> tuple of positional inputs, or dict of keyword inputs."
        yield "# Each rank and step needs another batch; the plan cannot run before this names one."
    yield f"batch = {to_toml(source.batch or _placeholder(source))}"
    if source.loss is None:
        yield "# loss is left out: output.loss is used, or the output itself if it is a scalar."
    else:
        yield f"loss = {to_toml(source.loss)}"
    yield from ("", "[parallel]", f"dp_shard = {_RANKS}  # ranks of the real job", "", "[bucket]")
    if bucket.entries:
        yield "plan = ["
        yield from (f"  {to_toml(entry)}," for entry in bucket.entries)
        yield "]"
    if bucket.unplanned != "error":
        yield f"unplanned = {to_toml(bucket.unplanned)}  # parameters in no entry share one bucket"


def _placeholder(source: Source) -> str:
    return source.factory.partition(":")[0] + ":batch"


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise FxbucketError(f"{out} cannot be written: {error.strerror or error}") from error


def _ties(model: nn.Module) -> Iterator[str]:
    aliases = Names.of(model).aliases
    for alias, fqn in list(aliases.items())[:3]:
        yield f"{alias} is tied to {fqn}: one parameter, in one entry, counted once in each total."
    if len(aliases) > 3:
        yield f"{len(aliases) - 3} more parameters are tied."


def _summary(out: Path, source: Source, bucket: Draft) -> Iterator[str]:
    rest = "; the rest share one bucket" if bucket.unplanned == "root" else ""
    yield f"Wrote {out}: {', '.join(bucket.entries) or 'no block found'}{rest}."
    if source.batch is None:
        yield (f"There is no batch beside the factory: write {_placeholder(source)}(rank, step), or name one in {out}.")
    if source.loss is None:
        yield "There is no loss beside the factory: output.loss is used, or the output itself."
    yield f"Next: pytest --fxbucket-plans={out}"
