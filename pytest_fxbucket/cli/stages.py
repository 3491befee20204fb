"""``fxbucket stages PLAN``: the stages of a plan, what crosses them, and what its schedule idles; without ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.common import above_rows, add_json, add_plan, name_of, print_json, working_on
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.words import counted, human_bytes, show, times

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.of_plan import PlannedStage, PlannedStages
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.pipelined import Crossing

_WAYS = ("receives", "makes", "passes_on", "bypasses")
_LABEL = len("passes on") + 2


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket stages``."""
    add_plan(parser)
    add_json(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a picture of the stages as a page, too")


def run(options: Namespace) -> int:
    """Trace the plan's forward, cut it, and tell; raises FxbucketError, and then nothing is on stdout."""
    plan, rows = find_plan(options.plan)
    name = name_of(plan)
    with working_on(plan, name) as say:
        from pytest_fxbucket.pipeline.of_plan import planned_stages

        found = planned_stages(plan, say)
    if options.html is not None:
        from pytest_fxbucket.bench.report.stages import write_stages_page

        write_stages_page(options.html, name, plan, found)
    if options.json:
        head = {"plan": str(plan.path), "row": plan.matrix_id, "rows": rows}
        print_json({**head, **_document(plan, found)})
        return 0
    for line in _lines(plan, found, name):
        print(line)
    for line in above_rows(plan, rows, "a row is told"):
        print(f"\n{line}")
    return 0


def _lines(plan: Plan, found: PlannedStages, name: str) -> Iterator[str]:
    assert plan.pipeline is not None
    pp, count = plan.parallel.pp, plan.step.microbatches
    yield (
        f"{name}: {counted(plan.stages, 'stage')} on {counted(pp, 'rank')} of pp by {plan.pipeline.schedule}, "
        f"{counted(count, 'microbatch')}"
    )
    yield f"cuts{f', proposed by {found.by}' if found.by else ''}: [{', '.join(map(show, found.cuts))}]"
    for stage in found.stages:
        yield ""
        # What the first stage receives was made by no stage: it is the batch.
        yield from _stage_lines(stage, found.stages[0].summary.receives)
    yield ""
    for fqn, stages in found.ties.items():
        yield f"tied: {fqn} in stages {', '.join(map(str, stages))}"
    if found.unread:
        yield f"in no stage, since forward does not read them: {', '.join(found.unread)}"
    if found.repeated:
        repeated = [f"{fqn} ({times(found.repeated[fqn])})" for fqn in _outermost([*found.repeated])]
        yield f"no place for a cut, since forward calls them more than once: {', '.join(repeated)}"
    yield (
        f"crossing: {human_bytes(found.crossing_bytes)} in forward of a microbatch, "
        f"{human_bytes(found.sent_bytes)} of it between ranks"
    )
    book = f"; (p - 1) / (m + p - 1) is {_percent(found.by_the_book)}" if found.by_the_book is not None else ""
    yield f"bubble: {_percent(found.bubble)} of the ranks' time if a backward takes as long as two forwards{book}"


def _stage_lines(stage: PlannedStage, batch: Sequence[Crossing]) -> Iterator[str]:
    said = stage.summary
    yield (
        f"stage {said.index} on rank {stage.rank}: {counted(stage.parameters, 'parameter')} "
        f"({human_bytes(stage.parameter_bytes)}), {said.flops:,} FLOPs"
    )
    yield from _labelled("modules", [", ".join(_outermost(said.modules)) or "no whole one"])
    for way in _WAYS:
        yield from _labelled(way.replace("_", " "), [_value(one, batch) for one in getattr(said, way)])


def _labelled(label: str, texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield f"  {label:<{_LABEL}}{text}"
        label = ""


def _outermost(modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` that are in no other."""
    return [fqn for fqn in modules if not any(fqn.startswith(f"{other}.") for other in modules)]


def _value(one: Crossing, batch: Sequence[Crossing]) -> str:
    maker = "of the batch" if one in batch else f"made in stage {one.stage}{f' by {one.module}' if one.module else ''}"
    return f"{one.name} {list(one.shape)} {_dtype(one)}, {human_bytes(one.bytes)}, {maker}"


def _dtype(one: Crossing) -> str:
    return str(one.dtype).removeprefix("torch.")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _document(plan: Plan, found: PlannedStages) -> dict[str, Any]:
    """The same for JSON, and more than the lines have; sizes in bytes, shares from 0 to 1."""
    assert plan.pipeline is not None
    return {
        "schedule": plan.pipeline.schedule,
        "pp": plan.parallel.pp,
        "microbatches": plan.step.microbatches,
        "cuts": list(found.cuts),
        "proposed_by": found.by or None,
        "stages": [_stage_data(stage) for stage in found.stages],
        "ties": [{"fqn": fqn, "stages": list(stages)} for fqn, stages in found.ties.items()],
        "unread": list(found.unread),
        "repeated": [{"fqn": fqn, "calls": calls} for fqn, calls in found.repeated.items()],
        "crossing_bytes": found.crossing_bytes,
        "sent_bytes": found.sent_bytes,
        "bubble": found.bubble,
        "bubble_by_the_book": found.by_the_book,
    }


def _stage_data(stage: PlannedStage) -> dict[str, Any]:
    said = stage.summary
    return {
        "stage": said.index,
        "rank": stage.rank,
        "modules": list(said.modules),
        "parameters": stage.parameters,
        "parameter_bytes": stage.parameter_bytes,
        "parameter_names": list(said.parameters),
        "buffer_names": list(said.buffers),
        "flops": said.flops,
        **{way: [_value_data(one) for one in getattr(said, way)] for way in _WAYS},
    }


def _value_data(one: Crossing) -> dict[str, Any]:
    return {
        "name": one.name,
        "made_in": one.stage,
        "module": one.module,
        "shape": list(one.shape),
        "strides": list(one.strides),
        "dtype": _dtype(one),
        "bytes": one.bytes,
    }
