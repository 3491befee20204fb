"""Whether a pass kept what it was asked for: launches that share an entry are one, and limits of a schedule hold.

What can be merged is what our pass merges, whose values its own tests look at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.checks.promises.automatic import in_flight_problems
from pytest_fxbucket.cost.memory import liveness_of
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.fuzz.groups import fake_groups
from pytest_fxbucket.fuzz.our_pass import run_pass
from pytest_fxbucket.fuzz.program import copied
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.carried import carried
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.plan.pass_tables import Overlap
from pytest_fxbucket.same.check import ends

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.fuzz.trial import Trial
    from pytest_fxbucket.fuzz.tried_pass import Subject

_RULES = {one.name for one in fields(Overlap)}


def broken(trial: Trial, subject: Subject, graphs: Sequence[fx.Graph]) -> Iterator[str]:
    """What the first rank's graph does not keep of the plan, a sentence each."""
    if subject.is_ours:
        yield from _limits(trial, without_kept_order(graphs[0]))
    elif subject.takes_plan and trial.plan:
        yield from _launches(trial, graphs[0])


def _launches(trial: Trial, graph: fx.Graph) -> Iterator[str]:
    ours = copied(trial.graph_module)
    dtypes = "mixed" if trial.options.get("bucket_mode") == "custom_ops_multidtype" else "separate"
    try:
        with fake_groups(trial.program.world, trial.program.groups):
            report = run_pass(ours.graph, trial.plan, dtypes=dtypes, prefetch=0, defer_reduce=False)
    except FxbucketError:  # of what ours refuses nothing is known
        return
    before, after, least = (_by_kind(one) for one in (trial.graph_module.graph, graph, ours.graph))
    for kind in before:
        if after[kind] > least[kind]:
            left = "all" if after[kind] >= before[kind] else "some"
            yield f"{left} {kind} launches stay as they were: {after[kind]}, of which the plan makes {least[kind]}"
        elif after[kind] < least[kind] and _parted_by_direction(report, kind):
            yield f"forward and backward share a {kind} launch, which keeps all gathered in between"


def _by_kind(graph: fx.Graph) -> Counter[str]:
    return Counter(kind for node in graph.nodes if (kind := collectives.launch_kind(node)) is not None)


def _parted_by_direction(report: PassReport, kind: str) -> bool:
    """Whether nothing but their directions kept launches of ``kind`` apart, and they did."""
    reasons = {split.reason for bucket in report.buckets if bucket.kind == kind for split in bucket.splits}
    return reasons == {"direction"} and all(left.kind != kind for left in report.left_alone)


def _limits(trial: Trial, graph: fx.Graph) -> Iterator[str]:
    rules = Overlap(**{name: value for name, value in trial.options.items() if name in _RULES})
    if rules.schedule != "auto":  # which alone has limits, and never symbolic sizes, that counting bytes would settle
        return
    yield from in_flight_problems(rules, graph)
    share, more = rules.max_memory_increase, rules.max_memory_increase_gb
    if share is None and more is None:
        return
    was, now = (liveness_of(one, *ends(one)).peak for one in (trial.graph_module.graph, graph))
    if share is not None and now > was * (1 + share):
        yield f"{now} bytes live at once, {was} before, and max_memory_increase = {share}"
    if more is not None and now > was + more * (1 << 30):
        yield f"{now} bytes live at once, {was} before, and max_memory_increase_gb = {more}"


def gathers_anew(graph: fx.Graph) -> bool:
    """Whether a parameter is gathered more than once: rounds of what is merged are counted anew, and may go further ahead."""
    counts: Counter[Any] = Counter(
        name for node, one in carried(graph).items() if collectives.is_all_gather(node) for name in one.fqns
    )
    return max(counts.values(), default=0) > 1
