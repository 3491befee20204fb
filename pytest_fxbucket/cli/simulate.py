"""``fxbucket simulate PLAN``: a plan's step on a cluster that is not there, bucket by bucket; without ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.cluster_options import add_cluster, cluster_asked, ms, on_world, refuse_preset, save_preset
from pytest_fxbucket.cli.common import above_rows, add_json, add_pass, add_plan, name_of, print_json, refuse_no_pass, working_on
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.golden.text import ranges_text
from pytest_fxbucket.words import counted, human_bytes

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.simulate.calibrate import CalibratedCluster
    from pytest_fxbucket.simulate.of_plan import NamedFlight, SimulatedRank
    from pytest_fxbucket.simulate.stages import StagedTimeline
    from pytest_fxbucket.simulate.timeline import Timeline

    _Sides = list[tuple[SimulatedRank, Timeline]]
    """For each class of ranks the simulated step after the pass, and the one before it."""
_MOST_EXPOSED, _MOST_LIVING = 20, 8


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket simulate``."""
    add_plan(parser)
    add_cluster(parser)
    parser.add_argument(
        "--calibrate",
        metavar="TRACE",
        type=Path,
        help="fit the cluster to a step of the plan that was measured: a trace of torch's profiler, or of --fxbucket-report",
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the cluster as a preset, a new TOML file")
    add_json(parser)
    add_pass(parser)


def run(options: Namespace) -> int:
    """Trace the plan's step, run the pass, simulate both, and tell; raises FxbucketError, and then nothing is on stdout."""
    refuse_no_pass(options.pass_name)
    if options.save is not None:
        # Said before the step is traced, which takes long.
        refuse_preset(options.save)
    plan, rows = find_plan(options.plan)
    asked = on_world(plan, options.world)
    name, pass_name = name_of(plan), options.pass_name or plan.pass_name
    with working_on(plan, name) as say:
        from pytest_fxbucket.captured_plan import CapturedPlan
        from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
        from pytest_fxbucket.simulate.of_plan import in_schedule, simulated_ranks, unbucketed

        cluster, calibrated = cluster_asked(plan, options.cluster), None
        world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), say), pass_name)
        # A trace was measured on the plan's own mesh, so the cluster is fitted there before --world changes the mesh.
        if options.calibrate is not None:
            from pytest_fxbucket.bench.calibrated import calibrated_by

            calibrated = calibrated_by(options.calibrate, world, cluster)
            cluster = replace(calibrated.cluster, name=f"{cluster.name} as in {options.calibrate.name}")
        if asked != plan:
            plan, world = asked, PlanOnMesh(CapturedPlan(asked, mesh_of(asked), say), pass_name)
        # Believed, without proof which ranks are alike: here figures are told, and no check decides by them.
        sides = [(one, unbucketed(world, one.ranks[0], cluster)) for one in simulated_ranks(world, cluster, believed=True)]
        scheduled = in_schedule(world, cluster)
        if options.save is not None:
            save_preset(options.save, cluster, calibrated)
    if options.json:
        head = {"plan": str(plan.path), "row": plan.matrix_id, "rows": rows, "pass": pass_name}
        on = {"cluster": cluster.name, "mesh": plan.degrees, "classes": [_document(*both) for both in sides]}
        on |= {"schedule": _schedule(scheduled)} if scheduled else {}
        on |= {"calibrated": _calibrated(calibrated)} if calibrated else {}
        print_json({**head, **on})
        return 0
    print(f"{name}: {counted(plan.world_size, 'rank')} on {cluster.name}, pass {pass_name}")
    for line in [*([str(calibrated)] if calibrated else []), *_in_schedule(plan, scheduled), *_lines(sides)]:
        print(line)
    for line in above_rows(plan, rows, "a row is told"):
        print(f"\n{line}")
    return 0


# For people.


def _in_schedule(plan: Plan, scheduled: StagedTimeline | None) -> Iterator[str]:
    if scheduled is not None and plan.pipeline is not None:
        each = ", ".join(f"{100 * one:.1f}" for one in scheduled.bubbles)
        yield (
            f"{counted(plan.stages, 'stage')} by {plan.pipeline.schedule}: a step of {ms(scheduled.seconds)} ms, in which "
            f"ranks along pp idle {each} % of the schedule; below, each graph runs once"
        )


def _lines(sides: _Sides) -> Iterator[str]:
    for found, before in sides:
        yield ""
        if len(sides) > 1:
            yield f"rank {ranges_text(found.ranks)}"
        yield from _sums(found.timeline, before)
        yield from _exposed(found.flights)
        yield from _living(found.timeline)


_TIMES = {"step": "seconds", "compute": "compute", "exposed": "exposed", "else": "rest"}


def _sums(after: Timeline, before: Timeline) -> Iterator[str]:
    rows = [
        ("", "bucketed", "unbucketed"),
        *((label, *(f"{ms(getattr(one, what))} ms" for one in (after, before))) for label, what in _TIMES.items()),
        ("hidden", *(f"{one.hidden} of {len(one.flights)}" for one in (after, before))),
        ("peak memory", *(human_bytes(one.peak_bytes) for one in (after, before))),
    ]
    for label, *cells in rows:
        yield f"{label:<12}{cells[0]:>16}{cells[1]:>16}"


def _exposed(flights: Sequence[NamedFlight]) -> Iterator[str]:
    exposed = sorted((one for one in flights if not one.flight.is_hidden), key=lambda one: -one.flight.exposed)
    if not exposed:
        yield "\nexposed: nothing"
        return
    width = max(len(one.name) for one in exposed[:_MOST_EXPOSED])
    yield f"\n{'exposed':<{width + 2}}  exposed ms  in flight ms  why"
    for one in exposed[:_MOST_EXPOSED]:
        yield f"  {one.name:<{width}}{ms(one.flight.exposed):>12}{ms(one.flight.seconds):>14}  {one.reason}"
    if rest := exposed[_MOST_EXPOSED:]:
        yield f"  ... and {len(rest)} more, {ms(sum(one.flight.exposed for one in rest))} ms exposed"


def _living(line: Timeline) -> Iterator[str]:
    yield f"\nat the peak, {line.peak_node} in the {line.peak_phase} graph"
    for one in line.living[:_MOST_LIVING]:
        yield f"  {human_bytes(one.bytes):>10}  {one.kind:<13}  {one.module or '(no module)'}"
    if rest := line.living[_MOST_LIVING:]:
        yield f"  {human_bytes(sum(one.bytes for one in rest)):>10}  of {len(rest)} more"


# For programs.


def _document(found: SimulatedRank, before: Timeline) -> dict[str, Any]:
    """Times in seconds since the step began, sizes in bytes."""
    return {
        "ranks": list(found.ranks),
        "bucketed": _step(found.timeline),
        "unbucketed": _step(before),
        "buckets": [_bucket(one) for one in found.flights],
    }


def _schedule(line: StagedTimeline) -> dict[str, Any]:
    """The schedule of all ranks along pp together."""
    return {"seconds": line.seconds, "bubble": line.bubble, "bubbles": list(line.bubbles)}


def _calibrated(found: CalibratedCluster) -> dict[str, Any]:
    """Errors as fractions of the measured times."""
    errors = {
        work: {"count": error.count, "median": error.middle, "ninth_decile": error.most} for work, error in found.errors.items()
    }
    return {"errors": errors, "unmatched": list(found.unmatched)}


def _step(line: Timeline) -> dict[str, Any]:
    return {
        "seconds": line.seconds,
        "compute": line.compute,
        "exposed": line.exposed,
        "rest": line.rest,
        "hidden": line.hidden,
        "launches": len(line.flights),
        "peak_bytes": line.peak_bytes,
        "peak_node": line.peak_node,
        "peak_graph": line.peak_phase,
        "living": [{"kind": one.kind, "module": one.module, "bytes": one.bytes} for one in line.living],
    }


def _bucket(one: NamedFlight) -> dict[str, Any]:
    flight = one.flight
    return {
        "name": one.name,
        "direction": one.direction,
        "kind": flight.kind,
        "graph": flight.phase,
        "launch": flight.node,
        "bytes": flight.bytes,
        **one.as_data(),
    }
