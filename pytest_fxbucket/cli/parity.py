"""``fxbucket parity PLAN``: the plan's step beside torch's own, or the trainer's, for as many steps as one likes."""

from __future__ import annotations

import math
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.backends import CHOICES
from pytest_fxbucket.cli.common import add_pass, add_plan, name_of, refuse_no_pass
from pytest_fxbucket.cli.ctrl_c import STOPPED
from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.plan.folders import root_of
from pytest_fxbucket.progress import on_stderr

if TYPE_CHECKING:
    from pytest_fxbucket.checks.verdict import Verdict
    from pytest_fxbucket.eager.step_reports import StepReport
    from pytest_fxbucket.plan.schema import Plan


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket parity``."""
    add_plan(parser)
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="how many (default: 500)")
    parser.add_argument("--reduce", choices=("rank_order", "ring"), help="the order of sums, instead of the plan's")
    parser.add_argument("--backend", choices=CHOICES, help="process group back end instead of the plan's")
    add_pass(parser)


def run(options: Namespace) -> int:
    """Print each step as it ends, then what became of all; gives 0 if all had equal bits, 1 if not, 130 if it was stopped."""
    refuse_no_pass(options.pass_name)
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: expected a whole number of at least 1")
    plan, _ = find_plan(options.plan)
    log = _Log(plan.run_world)
    try:
        verdict = _ran(_planned(plan, options), options, log)
    except KeyboardInterrupt:
        print(f"fxbucket: stopped; {log.compared()}", file=sys.stderr)
        return STOPPED
    for line in (*verdict.lines, f"{verdict.outcome}: {verdict.summary}"):
        print(line)
    print(log.compared())
    return 0 if verdict.outcome == "passed" and log.not_finite is None else 1


def _planned(plan: Plan, options: Namespace) -> Plan:
    """The plan with the steps asked for, and a time limit that grows with them."""
    asked = plan.run
    longest = asked.timeout_s * math.ceil(options.steps / asked.steps)
    rounds = options.reduce or asked.reduce
    ring = asked.ring if rounds == "ring" else None
    return replace(plan, run=replace(asked, steps=options.steps, timeout_s=longest, reduce=rounds, ring=ring))


def _ran(plan: Plan, options: Namespace, log: _Log) -> Verdict:
    from pytest_fxbucket.eager import WARM
    from pytest_fxbucket.eager.step_reports import StepReports
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.settings import RunSettings

    root = root_of(plan.path)
    settings = RunSettings(root, root / "golden", root / ".fxbucket", options.pass_name, options.backend)
    progress = on_stderr()
    pools = Pools(warm=WARM)
    try:
        with tempfile.TemporaryDirectory() as folder, progress.watching(name_of(plan)):
            pipe = Path(folder) / "steps"
            with StepReports(pipe, plan.run_world, log.print_step):
                return PlanRun(plan, settings, pools, progress.say).parity(str(pipe))
    finally:
        pools.close()


@dataclass
class _Log:
    """Summary of the steps that ranks have reported so far."""

    ranks: int
    steps: int = 0
    equal: int = 0
    """Steps from the first on that all ranks found equal."""
    first: str = ""
    """First difference."""
    not_finite: int | None = None
    """First step whose loss is no number: equal bits of those show nothing."""
    peaks: tuple[int, int] = (0, 0)
    """Most bytes of a rank after the first 10 steps, and after the last step told."""

    def print_step(self, of_ranks: list[StepReport]) -> None:
        """Print a step that all ranks have run."""
        self.steps += 1
        self.first = self.first or next((one.first for one in of_ranks if one.first), "")
        self.equal += not self.first
        if self.not_finite is None and not all(math.isfinite(one.eager) for one in of_ranks):
            self.not_finite = of_ranks[0].step
        peak = max(one.peak_bytes for one in of_ranks)
        self.peaks = (self.peaks[0] if self.steps > 10 else peak, peak)
        graph, eager = (sum(getattr(one, side) for one in of_ranks) / len(of_ranks) for side in ("graph", "eager"))
        how = "other bits" if self.first else "equal"
        print(f"step {of_ranks[0].step}: loss {graph:.9g}, eager {eager:.9g}, {how}", flush=True)

    def compared(self) -> str:
        """What is known by now."""
        if not self.steps:
            return "no step was compared"
        if not self.first:
            known = f"{self.equal} steps had equal bits on {self.ranks} ranks"
        else:
            known = f"{self.equal} of {self.steps} steps had equal bits on {self.ranks} ranks; first difference: {self.first}"
        if self.not_finite is not None:
            known += f"; from step {self.not_finite} on the loss is no number, whose bits show nothing"
        then, now = (size >> 20 for size in self.peaks)
        first = f"{then} MiB after 10 steps, " if self.steps > 10 else ""
        return f"{known}; the largest rank took {first}{now} MiB after {self.steps}"
