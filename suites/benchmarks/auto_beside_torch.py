"""Prints what two automatic overlap schedulers make of the same steps by one cost model: ours, and torch's.

torch's is ``schedule_overlap_bucketing``. It is given our seconds of every node in milliseconds, both estimators analytical,
and all else as it is by default; "+ buckets" has ``collective_bucketing=True``. Even without that, it puts collectives of
parameters together first: "as they are" is told not to, which leaves only the order to it. What it needed besides is in
:mod:`pytest_fxbucket.compat.torch_scheduler`.

Steps are unbucketed, on 64 ranks of the preset h100-sxm whose host takes no time, since no scheduler knows of one. hidden,
exposed and peak are the simulator's; "torch says" is what torch logs as exposed. Least exposed is the lower bound of any
schedule that launches the same and keeps compute in its order; torch packs launches and moves compute, so it may come below.
"its least" is the bound of what came out: the same launches, compute in that order. "step" is the whole step: what packs hides
communication too, and takes as long as it hides.
Seconds of this process on a core, which other work on a shared machine disturbs least, those of the code of the new graph among
them; torch is stopped after ten minutes.

``python -m suites.benchmarks.auto_beside_torch [--layers 16] [--models MoE] [--phases joint] [--schedulers ours] [--growth]``
"""

from __future__ import annotations

import argparse
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat.torch_scheduler import TorchAccount, torch_schedule_overlap
from pytest_fxbucket.cost.cluster import Cluster
from pytest_fxbucket.cost.costs import CostModel, Roofline, collective_seconds, groups_of
from pytest_fxbucket.graph.collectives import read_launch
from pytest_fxbucket.passes import schedule_overlap_bucketing
from pytest_fxbucket.simulate import cluster_named, simulate
from pytest_fxbucket.simulate.timeline import Timeline
from pytest_fxbucket.step.mesh import fake_mesh
from pytest_fxbucket.step.portable import own_copy
from pytest_fxbucket.step.roles import Phase, StepGraph
from suites.benchmarks.auto_steps import PLANS, captured, parts_of, tasks_of
from suites.benchmarks.lower_bound import Task, least_exposed
from suites.benchmarks.passes import slope

LAYERS = (16, 64, 128)
PHASES = ("joint", "forward", "backward")
GROWTH = (4, 12, 48)
"""Layers of 2-D Llama, of about 2,000, 5,000 and 20,000 nodes."""
STOPPED_S = 600
HELD = ("param", "buffer", "batch")
HEAD = ("scheduler", "hidden", "exposed", "its least", "torch says", "peak", "step", "seconds", "raised")


@dataclass(frozen=True)
class Job:
    """One graph to schedule."""

    step: StepGraph
    phase: Phase
    cluster: Cluster
    cost: CostModel

    @property
    def graph_module(self) -> fx.GraphModule:
        return self.step.graphs[self.phase]

    @cached_property
    def before(self) -> Timeline:
        """The step as it was captured."""
        return self.simulated(self.graph_module)

    def copied(self) -> fx.GraphModule:
        """For a pass to change."""
        return own_copy(self.graph_module)

    def simulated(self, made: fx.GraphModule) -> Timeline:
        """The step with ``made`` in place of its graph."""
        return simulate(replace(self.step, graphs={self.phase: made}), self.cluster, self.cost)

    def tasks(self, made: fx.GraphModule) -> list[Task]:
        """What ``made`` runs, for the lower bound."""
        return tasks_of(replace(self.step, graphs={self.phase: made}), self.phase, self.cost)

    def milliseconds(self, node: fx.Node, size: int | None) -> float:
        """As torch asks: of a launch also what it would take for ``size`` bytes."""
        launch = read_launch(node)
        if size is None or launch is None:
            return 1e3 * self.cost(node)
        ranks = groups_of(self.step)(launch.group, launch.ranks if isinstance(launch.ranks, int) else 0)
        return 1e3 * collective_seconds(launch.kind, size, ranks, self.cluster)


Scheduler = Callable[[Job, fx.GraphModule], tuple[fx.GraphModule, "TorchAccount | None"]]
"""Changes its graph, a copy of the job's."""


def by_ours(**keywords: Any) -> Scheduler:
    """Ours, with ``keywords``; limits are torch's defaults, of memory the larger one, as torch's code has it."""

    def scheduled(job: Job, made: fx.GraphModule) -> tuple[fx.GraphModule, TorchAccount | None]:
        more = max(1.0, 0.05 * job.before.peak_bytes / (1 << 30))

        def milliseconds(node: fx.Node, _: int | None) -> float:
            return 1e3 * job.cost(node)

        made = schedule_overlap_bucketing(
            made,
            custom_runtime_estimation=milliseconds,
            max_memory_increase_gb=more,
            max_memory_increase_ratio=None,
            cluster=job.cluster,
            **keywords,
        )
        return made, None

    return scheduled


def by_torch(**keywords: Any) -> Scheduler:
    """torch's, with ``keywords``."""

    def scheduled(job: Job, made: fx.GraphModule) -> tuple[fx.GraphModule, TorchAccount | None]:
        inputs = zip(made.graph.find_nodes(op="placeholder"), job.step.inputs[job.phase], strict=True)
        held = [node for node, value in inputs if value.role in HELD]
        return torch_schedule_overlap(made, job.milliseconds, held, **keywords)

    return scheduled


SCHEDULERS: dict[str, Scheduler] = {
    "ours": by_ours(),
    "ours + buckets": by_ours(collective_bucketing=True),
    "torch": by_torch(),
    "torch + buckets": by_torch(collective_bucketing=True),
    "torch, as they are": by_torch(pre_bucketing_fsdp_collectives=False),
}


def main() -> None:
    """Print a table for each model and number of layers, and torch's growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--models", nargs="*", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=PHASES)
    parser.add_argument("--schedulers", nargs="*", choices=list(SCHEDULERS), default=list(SCHEDULERS))
    parser.add_argument("--growth", action="store_true", help="torch's seconds by nodes, and nothing else")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, 64 ranks of h100-sxm; milliseconds, and GiB")
    if given.growth:
        growth()
        return
    for layers in given.layers:
        for name in given.models:
            for line in rows(name, layers, given.phases, given.schedulers):
                print(line, flush=True)


def rows(name: str, layers: int, phases: Sequence[Phase], schedulers: Sequence[str]) -> Iterator[str]:
    """What ``schedulers`` make of one model."""
    mesh, step = captured(name, layers)
    cluster = replace(cluster_named("h100-sxm", Path()), launch=0.0)
    with fake_mesh(mesh, 0):
        for phase, part in parts_of(step).items():
            if phase not in phases:
                continue
            job = Job(part, phase, cluster, Roofline(cluster, groups_of(part)))
            before, tasks = job.before, job.tasks(job.graph_module)
            least, in_any = (1e3 * least_exposed(one) for one in (tasks, [replace(task, order="free") for task in tasks]))
            nodes = len(job.graph_module.graph.nodes)
            yield f"\n{name}, {layers} layers, {phase}: {nodes:,} nodes, compute {1e3 * before.compute:.1f}"
            yield f"least exposed {least:.2f}, with compute in any order {in_any:.2f}"
            yield _line(HEAD)
            yield _line(("as captured", *_figures(before, least, ""), "", ""))
            for scheduler in schedulers:
                yield _line((scheduler, *_scheduled(job, SCHEDULERS[scheduler])))


def _scheduled(job: Job, run: Scheduler) -> tuple[str, ...]:
    made, account, seconds, raised = timed(job, run)
    if made is None:
        return ("", "", "", "", "", "", f"{seconds:.1f}", raised)
    says = f"{account.exposed_ms:.2f}" if account else ""
    return (*_figures(job.simulated(made), 1e3 * least_exposed(job.tasks(made)), says), f"{seconds:.1f}", "")


def timed(job: Job, run: Scheduler) -> tuple[fx.GraphModule | None, TorchAccount | None, float, str]:
    """What ``run`` made, its account, its seconds, and what it raised."""
    copied = job.copied()
    gc.collect()
    begin = time.process_time()
    try:
        with _stopped_after(STOPPED_S):
            made, account = run(job, copied)
    except Exception as error:  # whatever a pass raises is a figure here
        sentence = " ".join(str(error).split()) or "without a word"
        return None, None, time.process_time() - begin, f"{type(error).__name__}: {sentence[:160]}"
    return made, account, time.process_time() - begin, ""


def _figures(found: Timeline, least: float, says: str) -> tuple[str, ...]:
    flights = f"{found.hidden} of {len(found.flights)}"
    peak, step = f"{found.peak_bytes / 2**30:.1f}", f"{1e3 * found.seconds:.2f}"
    return flights, f"{1e3 * found.exposed:.2f}", f"{least:.2f}", says, peak, step


def _line(cells: Sequence[str]) -> str:
    name, *figures, raised = cells
    return f"{name:20}" + "".join(f"{one:>14}" for one in figures) + f"   {raised}".rstrip()


@contextmanager
def _stopped_after(seconds: int) -> Iterator[None]:
    """Raise TimeoutError inside after so many seconds of the clock."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"stopped after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def growth() -> None:
    """Print the seconds of each scheduler by nodes."""
    print(f"\nseconds by nodes, and x of nodes^x\n{'nodes':>8}" + "".join(f"{name:>20}" for name in SCHEDULERS))
    sizes, seconds = list[int](), list[list[float]]()
    for layers in GROWTH:
        mesh, step = captured("2-D Llama", layers)
        cluster = replace(cluster_named("h100-sxm", Path()), launch=0.0)
        with fake_mesh(mesh, 0):
            job = Job(step, "joint", cluster, Roofline(cluster, groups_of(step)))
            assert job.before.peak_bytes  # which nobody is to wait for
            found = [timed(job, run) for run in SCHEDULERS.values()]
        sizes.append(len(job.graph_module.graph.nodes))
        seconds.append([took for _, _, took, _ in found])
        print(f"{sizes[-1]:8,}" + "".join(f"{took:20.2f}{'*' if raised else ''}" for _, _, took, raised in found), flush=True)
    print(f"{'x':>8}" + "".join(f"{slope(sizes, column):20.2f}" for column in zip(*seconds, strict=True)))
    print("*: until it raised")


if __name__ == "__main__":
    main()
