"""The picture of a plan's stages: a box for each, in the row of its rank, and an arrow for the values that cross each cut."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.report.page import html_page
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.files import write_whole
from pytest_fxbucket.words import counted, human_bytes, some

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.of_plan import PlannedStage, PlannedStages
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.pipelined import Crossing

BOX, GAP = (170, 74), (120, 40)
"""(width, height) of a box, and of the gap between two, in pixels."""
_LEFT, _TOP = 70, 24


def write_stages_page(path: Path, name: str, plan: Plan, found: PlannedStages) -> None:
    """Write the page of the plan ``name``, which loads no other file; the file is written whole or not at all.

    Raises :class:`BenchmarkError` without jinja2, or if ``path`` cannot be written.
    """
    if find_spec("jinja2") is None:
        raise BenchmarkError(
            "a page needs jinja2, which is not installed; install it with pip install 'pytest-fxbucket[report]'"
        )
    page = html_page("stages.html", f"Stages of {name}", picture=picture_of(plan, found))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be written: {error.strerror or error}") from error


def picture_of(plan: Plan, found: PlannedStages) -> dict[str, Any]:
    """The values for the template: places in pixels, and all text."""
    assert plan.pipeline is not None
    ranks = range(plan.parallel.pp)
    share = f"{100 * found.bubble:.1f} %"
    return {
        "width": _LEFT + len(found.stages) * (BOX[0] + GAP[0]) - GAP[0] + 10,
        "height": _TOP + len(ranks) * (BOX[1] + GAP[1]),
        "box": BOX,
        "rows": [{"text": f"rank {rank}", "y": _place(0, rank)[1] + BOX[1] // 2} for rank in ranks],
        "boxes": [_box(stage) for stage in found.stages],
        "arrows": [
            _arrow(one, other, is_sent, values)
            for (one, other), (_, is_sent, values) in zip(
                zip(found.stages, found.stages[1:], strict=False), found.hops(), strict=True
            )
        ],
        "head": (
            f"{counted(plan.stages, 'stage')} on {counted(plan.parallel.pp, 'rank')} of pp by {plan.pipeline.schedule}, "
            f"{counted(plan.step.microbatches, 'microbatch')}; "
            f"ranks idle {share} of the time if a backward takes as long as two forwards"
        ),
        "crossing": (
            f"{human_bytes(found.crossing_bytes)} cross in the forward of a microbatch, {human_bytes(found.sent_bytes)} of it "
            "between ranks"
        ),
        "ties": [f"{fqn} is in stages {', '.join(map(str, stages))}" for fqn, stages in found.ties.items()],
    }


def _place(stage: int, rank: int) -> tuple[int, int]:
    """The upper left corner of the box."""
    return _LEFT + stage * (BOX[0] + GAP[0]), _TOP + rank * (BOX[1] + GAP[1])


def _box(stage: PlannedStage) -> dict[str, Any]:
    said = stage.summary
    x, y = _place(said.index, stage.rank)
    # The innermost modules: ``layers`` is left out beside ``layers.0``.
    ends = [fqn for fqn in said.modules if not any(fqn.startswith(f"{other}.") for other in said.modules)]
    return {
        "x": x,
        "y": y,
        "lines": [
            f"stage {said.index}",
            _short(" to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else "no whole module"),
            f"{stage.parameters:,} parameters",
            f"{human_bytes(stage.parameter_bytes)}, {said.flops:,} FLOPs",
        ],
        "title": f"modules: {some(ends, 40) or 'no whole one'}",
    }


def _short(text: str, most: int = 28) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _arrow(one: PlannedStage, other: PlannedStage, is_sent: bool, values: tuple[Crossing, ...]) -> dict[str, Any]:
    (x, y), (to_x, to_y) = _place(one.summary.index, one.rank), _place(other.summary.index, other.rank)
    x, y, to_y = x + BOX[0], y + BOX[1] // 2, to_y + BOX[1] // 2
    bend = GAP[0] // 2
    bypassing = {value.name for value in one.summary.bypasses}
    return {
        "path": f"M{x} {y} C{x + bend} {y} {to_x - bend} {to_y} {to_x - 7} {to_y}",
        "x": (x + to_x) // 2,
        "y": (y + to_y) // 2 - 7,
        "text": human_bytes(sum(value.bytes for value in values)),
        "is_sent": is_sent,
        "title": "\n".join(
            f"{value.name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}, {human_bytes(value.bytes)}"
            f"{', passed by' if value.name in bypassing else ''}"
            for value in values
        ),
    }
