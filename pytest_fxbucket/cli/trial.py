"""Does a first plan pass? Its step is traced, the pass is run and looked at, as pytest would; ranks are not started."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pytest_fxbucket.cli.blocks import Draft
from pytest_fxbucket.cli.first_plan import Source, plan_text
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan import parse_plans

_INPUTS: Sequence[tuple[str | int, ...]] = ((0,), ("0.*",))
"""What a model may be given of a batch that it is not to have whole: the first item, or what is in it."""
_MOST_OVERRIDES = 8
_MODULE = re.compile(r"tracing module (\S+) failed")


@dataclass(frozen=True, slots=True)
class Tried:
    """A first plan, and what is still wrong with it; empty: nothing."""

    source: Source
    problem: str = ""


def tried(source: Source, bucket: Draft, out: Path, modules: Mapping[str, type], say: Callable[[str], None]) -> Tried:
    """``source`` with what it needs to pass, if that is ``inputs`` or overrides of some of ``modules``."""
    first = _overriding(source, bucket, out, modules, say)
    if first.problem:
        for inputs in _INPUTS:
            other = _overriding(replace(first.source, inputs=inputs), bucket, out, modules, say)
            if not other.problem:
                return other
    return first


def _overriding(source: Source, bucket: Draft, out: Path, modules: Mapping[str, type], say: Callable[[str], None]) -> Tried:
    """Modules that look at values are overridden, one after the other, until the step can be traced, or nothing helps."""
    now = source
    for _ in range(_MOST_OVERRIDES):
        problem, module = _problem(now, bucket, out, say)
        if not problem:
            return Tried(now)
        selector = _selector(module, modules)
        if not selector or selector in now.overridden:
            break
        now = replace(now, overridden=(*now.overridden, selector))
    return Tried(source, problem) if now is source else Tried(now, problem)


def _problem(source: Source, bucket: Draft, out: Path, say: Callable[[str], None]) -> tuple[str, str]:
    """What is wrong with the plan, and the module that looks at values; nothing if it passes."""
    from pytest_fxbucket.compat.trace import untraceable
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.settings import RunSettings

    (plan,) = parse_plans(plan_text(source, bucket), out.resolve())
    with TemporaryDirectory() as folder:
        run = PlanRun(plan, RunSettings(Path.cwd(), Path(folder), Path(folder)), Pools(), say)
        try:
            for check in ("audit", "collectives"):
                verdict = run.check(check)
                if verdict.outcome == "failed":
                    return f"{check}: {'; '.join((verdict.summary, *verdict.lines[:3]))}", ""
        except FxbucketError as error:
            found = _MODULE.search(str(error))
            looks = error.__cause__ is not None and untraceable(error.__cause__)
            return str(error), found[1] if found and looks else ""
    return "", ""


def _selector(module: str, modules: Mapping[str, type]) -> str:
    """``module`` and those of its class in other layers, as a selector of overrides; empty for none."""
    parts = module.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    for places in (numbers, *([place] for place in numbers)):
        star = ["*" if place in places else part for place, part in enumerate(parts)]
        alike = re.compile(r"\.".join(r"[^.]+" if part == "*" else re.escape(part) for part in star))
        classes = [cls for fqn, cls in modules.items() if alike.fullmatch(fqn)]
        if len(classes) > 1 and set(classes) == {modules.get(module)}:
            return ".".join(star)
    return module if module in modules else ""
