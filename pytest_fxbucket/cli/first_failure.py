"""Does a plan that a command wrote pass? Its step is traced, the pass is run and looked at; ranks are not started."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.schema import Plan

MOST_OVERRIDES = 8
_MODULE = re.compile(r"tracing module (\S+) failed")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a plan does not pass."""

    said: str
    module: str = ""
    """That cannot be traced."""
    looks_at_values: bool = False

    def to_override(self, modules: Mapping[str, type], overridden: Collection[str]) -> str:
        """The selector, of ``modules``, to override what looks at values; empty where none would help that is not there yet."""
        selector = selector_of(self.module, modules) if self.looks_at_values else ""
        return selector if selector not in overridden else ""


def first_failure(plan: Plan, checks: Sequence[str], say: Callable[[str], None], root: Path | None = None) -> Problem | None:
    """What is wrong with ``plan``, whose code is found from ``root`` on; None if it passes ``checks``."""
    from pytest_fxbucket.compat.tracing import untraceable
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.settings import RunSettings

    pools = Pools()
    with TemporaryDirectory() as folder:
        settings = RunSettings(root or plan.path.parent, Path(folder), Path(folder), backend="local")
        run = PlanRun(plan, settings, pools, say)
        try:
            for check in checks:
                verdict = run.check(check)
                if verdict.outcome == "failed":
                    return Problem(f"{check}: {'; '.join((verdict.summary, *verdict.lines[:3]))}")
        except FxbucketError as error:
            found = _MODULE.search(str(error))
            looks = error.__cause__ is not None and bool(untraceable(error.__cause__))
            return Problem(str(error), found[1] if found else "", looks)
        finally:
            pools.close()
    return None


def selector_of(module: str, modules: Mapping[str, type]) -> str:
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
