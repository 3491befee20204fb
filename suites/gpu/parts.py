"""The parts of ``make gpu``: each gives what it tried, how that ended, and a figure or the reason.

They run on any back end: tests rehearse most of them over gloo. What only a GPU can run is in ``gpu_only_jobs``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_checks import Benchmark
from pytest_fxbucket.ranks.failure import RankFailure
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun, item_names
from pytest_fxbucket.settings import RunSettings

ROOT = Path(__file__).resolve().parents[2]
JOBS = "suites.gpu.step_jobs"
GPU_JOBS = "suites.gpu.gpu_only_jobs"

Found = tuple[str, Literal["passed", "failed", "skipped"], str]


@dataclass(frozen=True, slots=True)
class Rig:
    """What the parts run on."""

    backend: str = "nccl"
    staged: str = "gloo:cuda"
    worlds: tuple[int, ...] = (1, 2, 4, 8)
    plans: tuple[Path, ...] = field(default_factory=lambda: tuple(sorted((ROOT / "fixtures/plans").glob("*.toml"))))
    step: Path = ROOT / "fixtures/plans/llama.toml"
    """The plan whose step is repeated, timed and replayed."""
    compiled: tuple[str, ...] = ("tied, a graph break", "bfloat16, kept", "by size")
    """Of suites/compiled the cases that are trained under inductor."""
    repeats: int = 20
    limit_s: float = 120.0
    """Longest that one job may take."""
    hang_s: float = 15.0
    """How long ranks that hang are waited for."""
    pools: Pools | None = None
    """Warm ranks of another's; without them each part has its own."""

    @property
    def sharing(self) -> list[int]:
        """Numbers of ranks that repeat and time a step."""
        return [ranks for ranks in self.worlds if ranks in (2, 4)]

    @property
    def has_gpus(self) -> bool:
        """Whether ranks are on a GPU, and not in a rehearsal."""
        return self.backend == "nccl"


@contextmanager
def ranks_of(rig: Rig) -> Iterator[Pools]:
    """Warm ranks, ended when the part is, if they are its own."""
    if rig.pools is not None:
        yield rig.pools
        return
    pools = Pools(warm=["pytest_fxbucket.bench.measure"])  # jobs of these parts read plans' steps by it
    try:
        yield pools
    finally:
        pools.close()


# Plans: every check with what ranks run on, then bitwise and eager at each number of ranks that the plan's mesh has.


def plans(rig: Rig) -> Iterator[Found]:
    """Every check of every plan over ``rig.backend``."""
    yield from all_checks(rig, rig.backend)


def staged_plans(rig: Rig) -> Iterator[Found]:
    """The same over gloo with tensors on GPUs."""
    yield from all_checks(rig, rig.staged)


def worlds(rig: Rig) -> Iterator[Found]:
    """Bitwise and eager of each plan at other numbers of ranks; one is no mesh, as nobody would have anybody to talk to."""
    with ranks_of(rig) as pools:
        for ranks in (ranks for ranks in rig.worlds if ranks > 1):
            for plan in rows_of(rig):
                if (smaller := at_world(plan, ranks)) is not None:
                    yield from run_checks(smaller, ("bitwise", "eager"), rig.backend, pools)


def all_checks(rig: Rig, backend: str) -> Iterator[Found]:
    with ranks_of(rig) as pools:
        for plan in rows_of(rig):
            names = [name.partition("@")[0].partition("[")[0] for name in item_names(plan)]
            yield from run_checks(plan, [name for name in names if not name.startswith("benchmark")], backend, pools)


def rows_of(rig: Rig) -> list[Plan]:
    """Each plan and each row of its matrix."""
    return [plan for path in rig.plans for plan in load_plans(path)]


def at_world(plan: Plan, ranks: int) -> Plan | None:
    """``plan`` with a mesh of ``ranks`` ranks to be run; None: it has none, or it is the one that the plan has anyway.

    Of several such meshes the one whose outer dimensions are largest; those of data may grow beyond the plan's.
    """
    wide = {name: degree for name, degree in plan.degrees.items() if degree > 1}
    most = {name: ranks if name in ("dp_shard", "dp_replicate") else degree for name, degree in wide.items()}
    least = {name: degree if name == "pp" else 2 for name, degree in wide.items()}  # stages are cut for so many ranks
    choices = (range(most[name], least[name] - 1, -1) for name in wide)
    meshes = (dict(zip(wide, sizes, strict=True)) for sizes in product(*choices))
    found = next((mesh for mesh in meshes if prod(mesh.values()) == ranks), None)
    if found is None or ranks == plan.run_world:
        return None
    parallel = replace(plan.parallel, **{name: max(size, wide[name]) for name, size in found.items()})
    return replace(plan, parallel=parallel, run=replace(plan.run, world=found))


def run_checks(plan: Plan, names: Sequence[str], backend: str, pools: Pools) -> Iterator[Found]:
    """The checks of one row; one that cannot be run at all has failed."""
    with tempfile.TemporaryDirectory(prefix="fxbucket-gpu-") as folder:
        settings = RunSettings(ROOT, ROOT / "golden", Path(folder), backend=backend, require_gpus=False)
        run = PlanRun(plan, settings, pools)
        for name in (name for name in names if getattr(plan.checks, name)):
            what = f"{name}@{plan.run_world} of {run.name} over {backend}"
            try:
                verdict = run.check(name)
            except FxbucketError as error:
                yield what, "failed", str(error)
                continue
            lines = "" if verdict.outcome == "passed" else verdict.summary + "".join(f" / {line}" for line in verdict.lines[:3])
            yield what, verdict.outcome, lines


# One plan's step on ranks: the same bits again, its time, its timeline, CUDA graphs.


def repeats(rig: Rig) -> Iterator[Found]:
    """The bucketed step, again and again from the same state, gives the same bits."""
    with ranks_of(rig) as pools:
        for ranks in rig.sharing:
            digests = asked(pools, rig, f"{JOBS}:repeated", ranks, rig.repeats)
            different = [len(set(of_rank)) for of_rank in digests]
            what = f"{rig.repeats} steps on {ranks} ranks from the same state"
            yield what, "passed" if max(different) == 1 else "failed", f"{max(different)} different"


def step_time(rig: Rig) -> Iterator[Found]:
    """Both steps between two CUDA events, and what torch's profiler sees of them."""
    with ranks_of(rig) as pools:
        for ranks in rig.sharing:
            timed = asked(pools, rig, f"{JOBS}:timed", ranks, rig.repeats)
            of = {name: max(one["seconds"][name] for one in timed) for name in timed[0]["seconds"]}
            said = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in of.items())
            yield f"step time of {ranks} ranks that share a GPU", "passed", f"{said} (kernels take turns: no benchmark)"
            lost = [f"rank {rank} {name}" for rank, one in enumerate(timed) for name in of if not one["flights"][name]]
            seen = ", ".join(f"{name} {timed[0]['flights'][name]}" for name in of)
            yield f"launches in flight on {ranks} ranks' timelines", "failed" if lost else "passed", seen


def cuda_graphs(rig: Rig) -> Iterator[Found]:
    """The bucketed step as a CUDA graph gives the bits of the step itself."""
    with ranks_of(rig) as pools:
        for ranks in (1, 2):
            what = f"the bucketed step of rank 0 of {ranks} as a CUDA graph" if ranks > 1 else "an all-reduce as a CUDA graph"
            job = "graphed" if ranks > 1 else "graphed_all_reduce"
            try:
                different = asked(pools, rig, f"{GPU_JOBS}:{job}", ranks, None)
            except RankFailure as failure:
                # What CUDA says of it names the capture; a job that hangs or gives other bits is no such case.
                cannot = "captur" in failure.error.lower()
                yield what, "skipped" if cannot else "failed", f"{'cannot be captured: ' if cannot else ''}{failure}"
                continue
            yield what, "failed" if any(different) else "passed", ", ".join(different[0][:3])


def asked(pools: Pools, rig: Rig, job: str, ranks: int, payload: object) -> list[Any]:
    """What each rank answers, with the timing task of the rig's plan on that many ranks in its payload if it takes a step."""

    from pytest_fxbucket.bench.measure import tasks_of
    from pytest_fxbucket.bench.stats import Pacing
    from pytest_fxbucket.bench.step_time import worlds_of
    from pytest_fxbucket.captured_plan import CapturedPlan
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of

    (plan, *_) = load_plans(rig.step)
    payloads: list[object] = [payload] * ranks
    if ranks > 1:
        plan = at_world(plan, ranks) or plan
        world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan, run=True)), "manual")
        payloads = [(task, payload) for task in tasks_of(worlds_of(world, Benchmark()), Pacing(1.0, 0.0), traced_steps=1)]
    return pools.get(ranks, rig.backend).run(job, payloads, timeout_s=rig.limit_s, paths=[str(ROOT)])


# Ranks that fail, and the next job well.


def faults(rig: Rig) -> Iterator[Found]:
    """Each fault names its rank, and the next job is well."""
    on_gpus = {
        "illegal_access": "illegal memory access",
        "out_of_memory": "out of memory",
        "beyond_its_share": "out of memory",
    }
    with ranks_of(rig) as pools:
        for fault, said in {"kill": "SIGKILL", "hang": "never launched", "raises": "ValueError"}.items():
            yield from one_fault(rig, pools, f"{JOBS}:{fault}", said, rig.hang_s if fault == "hang" else rig.limit_s)
        for fault, said in on_gpus.items() if rig.has_gpus else ():
            yield from one_fault(rig, pools, f"{GPU_JOBS}:{fault}", said, rig.limit_s)


def one_fault(rig: Rig, pools: Pools, job: str, said: str, limit_s: float) -> Iterator[Found]:
    """Rank 2 of 4 fails."""
    pool, what = pools.get(4, rig.backend), job.partition(":")[2]
    try:
        pool.run(job, [2] * 4, timeout_s=limit_s)
    except RankFailure as failure:
        sentence = str(failure)
        is_named = failure.rank == 2 and said in sentence
        yield f"{what} on rank 2 of 4", "passed" if is_named else "failed", "" if is_named else sentence
    else:
        yield f"{what} on rank 2 of 4", "failed", "nothing was noticed"
    healthy = pool.run(f"{JOBS}:total", [None] * 4, timeout_s=rig.limit_s)
    yield f"the job after {what}", "passed" if healthy == [4.0] * 4 else "failed", "" if healthy == [4.0] * 4 else str(healthy)


# What a user writes, and sums.


def marker(rig: Rig) -> Iterator[Found]:
    """A test of a user's own on ranks, in a pytest of its own."""
    from suites.gpu.user_test import outcome

    for ranks in (count for count in rig.worlds if count <= 4):
        passed, output = outcome(rig.backend, ranks)
        yield f"fxbucket_ranks({ranks}, backend={rig.backend!r})", "passed" if passed else "failed", "" if passed else output


def ring_sums(rig: Rig) -> Iterator[Found]:
    """NCCL's own sums on one channel beside those of ``[run] reduce = "ring"``; an all-reduce up the tree knows no place."""
    with ranks_of(rig) as pools:
        for ranks, dtype, job in product((2, 3, 4), ("float32", "bfloat16"), ("summed", "moved")):
            sent = pools.get(ranks, rig.backend).run(f"{JOBS}:{job}", [dtype] * ranks, timeout_s=rig.limit_s)
            wrong: Mapping[str, int] = {}
            for of_rank in sent:
                wrong = {kind: wrong.get(kind, 0) + count for kind, count in of_rank.items()}  # type: ignore[attr-defined]
            said = ", ".join(f"{kind}: {count} elements differ" for kind, count in wrong.items())
            yield f"{job} in {dtype} on {ranks} ranks", "failed" if any(wrong.values()) else "passed", said


def inductor(rig: Rig) -> Iterator[Found]:
    """Compiled training with the pass and without: the same bits."""
    with ranks_of(rig) as pools:
        pool = pools.get(2, rig.backend)
        for case in rig.compiled:
            for found in pool.run(f"{JOBS}:compiled", [(case, rig.has_gpus)] * 2, timeout_s=4 * rig.limit_s)[:1]:
                differing: list[str] = found  # type: ignore[assignment]
                said = f"{len(differing)} tensors differ, first {differing[0]}" if differing else ""
                yield f"{case}, under inductor", "failed" if differing else "passed", said


PARTS: Mapping[str, Callable[[Rig], Iterator[Found]]] = {
    "marker": marker,
    "faults": faults,
    "repeats": repeats,
    "rings": ring_sums,
    "time": step_time,
    "graphs": cuda_graphs,
    "inductor": inductor,
    "plans": plans,
    "worlds": worlds,
    "staged": staged_plans,
}
"""In the order in which they run: what is quick and tells most first."""
