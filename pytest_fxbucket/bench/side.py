"""One side of ``fxbucket compare``, a process in the tree of a commit: ``python -m pytest_fxbucket.bench.side FD PPID``.

It reads requests from stdin and writes answers to the descriptor FD, one line of JSON each. The first request names the plan,
and its answer describes the graphs that will run. Each further request asks for a set of processes, and is answered when their
turns are over. The end of stdin ends the process. The two sides may be of different versions of this package: all that they
must agree on, this module's name included, has the number PROTOCOL. torch is imported once the ranks are being started.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from pytest_fxbucket.backends import BACKENDS, choose, row_of
from pytest_fxbucket.errors import BenchmarkError, FxbucketError
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.plan.factories import first_on_path
from pytest_fxbucket.plan.folders import folders_of
from pytest_fxbucket.ranks.call_job import die_with, ignore_interrupts
from pytest_fxbucket.ranks.machine import this_machine
from pytest_fxbucket.ranks.pools import Pools

if TYPE_CHECKING:
    from pytest_fxbucket.bench.job import TurnsTaken
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh

PROTOCOL = 1
_JOB = "pytest_fxbucket.bench.job"


def main(arguments: list[str]) -> int:
    """Serve until stdin ends; the exit status is 1 after an error, which was the last answer or is the last line of stderr."""
    # Answers have a descriptor of their own, since code of the plan may print to stdout.
    ignore_interrupts()
    die_with(int(arguments[1]))
    with open(int(arguments[0]), "w", encoding="utf-8") as answers:

        def say(answer: Mapping[str, Any]) -> None:
            print(json.dumps({"protocol": PROTOCOL, **answer}), file=answers, flush=True)

        try:
            for answer in _answers(sys.stdin):
                say(answer)
        except BrokenPipeError:  # nobody is there to be told
            return 1
        except FxbucketError as error:
            say({"error": str(error)})
            return 1
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def _answers(requests: IO[str]) -> Iterator[Mapping[str, Any]]:
    first = json.loads(requests.readline() or "{}")
    if first.get("protocol") != PROTOCOL:
        raise BenchmarkError(f"it takes turns by protocol {PROTOCOL}, not {first.get('protocol')}")
    with ExitStack() as stack:
        side = _side(first, stack)
        facts = side.facts()  # which imports what the plan names
        # By their files the comparing process finds modules of the working tree that should have come from the commit's.
        modules = [vars(module).get("__file__") for module in list(sys.modules.values()) if type(module) is type(sys)]
        yield {"facts": facts, "files": [path for path in modules if isinstance(path, str)]}
        for line in requests:
            yield side.take_turns(json.loads(line))


def _side(asked: Mapping[str, Any], stack: ExitStack) -> TimedSide:
    """The plan on its mesh, with its folders on ``sys.path`` and its ranks being started; all ends with ``stack``."""
    plan, _ = find_plan(asked["plan"])
    folders = folders_of(plan.path)
    pools = Pools((_JOB,))
    stack.callback(pools.close)
    pools.start()  # first, since the server imports torch while this process does
    stack.enter_context(first_on_path(folders))
    backend = _backend(plan, asked["backend"])  # it may refuse, which is best known before the step is traced
    from pytest_fxbucket.captured_plan import CapturedPlan
    from pytest_fxbucket.joined_step import as_run
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of

    pass_name = plan.pass_name if asked.get("as_planned") else asked["pass"]
    world = as_run(PlanOnMesh(CapturedPlan(plan, mesh_of(plan, run=True)), pass_name))
    return TimedSide(world, asked["variant"], backend, pools, folders)


def _backend(plan: Plan, asked: str | None) -> str:
    """The back end of the ranks: ``asked``, or without it the plan's. Raises BenchmarkError for one that cannot be timed."""
    name = asked or plan.run.backend
    if not row_of(name).timed_on:
        raise BenchmarkError(f"{plan.path}: back end {name} has no step time; use gloo, nccl or auto")
    found = choose(name, plan.run_world, this_machine(), plan.run.ranks_per_gpu).for_timing()
    if found.backend is None:
        raise BenchmarkError(f"{plan.path}: {found.lacking}")
    return BACKENDS[found.backend].timed_on


@dataclasses.dataclass(frozen=True, slots=True)
class TimedSide:
    """A plan that went through a pass, on ranks that take turns with those of the other side."""

    world: PlanOnMesh
    variant: str
    """bucketed or unbucketed"""
    backend: str
    pools: Pools
    folders: list[Path]

    def facts(self) -> Mapping[str, Any]:
        """A description of the graphs that will run, as plain data."""
        import torch

        from pytest_fxbucket.bench.measure import digests
        from pytest_fxbucket.bench.provenance import workload_of

        world, benchmark = self.world, self.world.plan.checks.benchmark
        return {
            "plan": str(world.plan.path),
            "row": world.plan.matrix_id,
            "pass": world.pass_name,
            "digest": list(digests(self.variant, world, 0)),
            "traced": list(digests("unbucketed", world, 0)),
            "workload": workload_of(world.plan),
            "ranks": world.size,
            "backend": self.backend,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "benchmark": dataclasses.asdict(benchmark) if dataclasses.is_dataclass(benchmark) else None,
        }

    def take_turns(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one set of processes until its turns are over; the results of the ranks, as plain data."""
        from pytest_fxbucket.bench.job import TurnTask
        from pytest_fxbucket.bench.measure import digests, tasks_of
        from pytest_fxbucket.bench.stats import Pacing

        world = self.world
        timed = tasks_of({self.variant: world}, Pacing(request["budget_s"], 0.0))
        tasks = [TurnTask(self.variant, task.phases, request["address"], task.staged) for task in timed]
        pool = self.pools.get(world.size, self.backend)
        results = pool.run(
            f"{_JOB}:take_turns",
            tasks,
            timeout_s=world.plan.run.timeout_s + request["budget_s"],
            paths=[str(folder) for folder in self.folders],
            what=f"step time of {world.plan.path}",
        )
        pool.close()  # the next set has processes of its own
        taken = cast("list[TurnsTaken]", results)
        if [one.digests for one in taken] != [digests(self.variant, world, rank) for rank in range(world.size)]:
            raise BenchmarkError(f"{world.plan.path}: a rank timed another graph than the one that it was sent")
        return {"peak_bytes": [one.peak_bytes for one in taken], "has_priority": all(one.has_priority for one in taken)}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
