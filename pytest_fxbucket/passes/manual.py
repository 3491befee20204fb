"""Our pass: merges the collectives of each entry of a module plan, and reorders launches and waits.

The same job as torch's ``torch._inductor.fx_passes.overlap_manual_scheduling``; written anew, and an error where that one does
nothing. The way of a graph through it: which launches (targets) share a bucket (grouping), merged (merge), and moved
(overlap). What cannot be done safely is left alone, and the report says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.buckets import peak_bytes
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.graph.order import compute_names, displaced
from pytest_fxbucket.graph.updates import update_nodes
from pytest_fxbucket.graph_view.roles_by_tracer import bare_values
from pytest_fxbucket.passes.auto.headroom import NoRoomError
from pytest_fxbucket.passes.auto.reorder import hiding_of, peak_of, reorder_by_itself
from pytest_fxbucket.passes.bucketer import Bucketer, hook_name
from pytest_fxbucket.passes.compute import Labels, OverlappedCompute, computes_of, gathered_lives, labels_of, overlapped
from pytest_fxbucket.passes.grouping import BUCKETED, grouping_of, named
from pytest_fxbucket.passes.keep_order import keep_order, without_kept_order
from pytest_fxbucket.passes.merge import Merged, merge
from pytest_fxbucket.passes.module_names import ModuleStackFn
from pytest_fxbucket.passes.new_nodes import shared_meta
from pytest_fxbucket.passes.prefetch import reorder
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.scheduler import Scheduler, kept_pairs, overrides, put_on_groups, refuse_unnamed
from pytest_fxbucket.passes.targets import UntouchedLaunch, by_module
from pytest_fxbucket.passes.updates import updates_behind
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap
from pytest_fxbucket.process import collector
from pytest_fxbucket.words import nearest, one_or_other, show

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.auto.estimates import Estimates
    from pytest_fxbucket.passes.report import Schedule, SplitReason
    from pytest_fxbucket.passes.targets import Targets


@dataclass(frozen=True, slots=True)
class ManualPass:
    """Merge and reorder the launches that a plan names, as its tables ask for."""

    bucket: Bucket = field(default_factory=Bucket)
    """Which launches share a bucket, and what a bucket is; its entries are those of the targets."""
    overlap: Overlap = field(default_factory=Overlap)
    """Where launches and waits stand."""
    bucketer: type[Bucketer] = Bucketer
    """Who decides what the table of buckets leaves to code."""
    scheduler: type[Scheduler] = Scheduler
    """Who decides what the table of places leaves to code."""

    @classmethod
    def of(cls, **options: Any) -> ManualPass:
        """By keys of both tables, whose names differ.

        Raises :class:`PlanError` for a key that neither has, and for a value that a plan may not have there.
        """
        tables: dict[Any, dict[str, Any]] = {Bucket: {}, Overlap: {}}
        fields = {key: (table, one) for table in tables for key, one in table.__dataclass_fields__.items()}
        for key, value in options.items():
            if key not in fields:
                raise PlanError(f'ManualPass takes no option "{key}"{nearest(key, sorted(fields))}')
            table, one = fields[key]
            given = list(value) if isinstance(value, tuple) else value
            tables[table][key] = one.metadata["rule"].read(given, f"ManualPass: {key}")
        return cls(*(table(**given) for table, given in tables.items()))

    def run(self, graph: fx.Graph, targets: Targets, estimates: Estimates | None = None) -> PassReport:
        """Change ``graph`` in place as :meth:`apply` does, and say what was done."""
        bucketer = self.bucketer(self.bucket)
        targets = replace(targets, planned=named(targets.planned, bucketer))
        # Taken before launches are merged, since afterwards nobody can tell.
        names, labels = compute_names(graph), labels_of(targets.planned)
        gathers = ((one.launch, [part.waits[0] for part in one.parts], [one]) for one in targets.planned)
        gathered_before = peak_bytes(gathered_lives(graph, gathers))
        done = self._apply(graph, targets, bucketer, estimates)
        lives = gathered_lives(graph, ((bucket.launch, bucket.results, bucket.members) for bucket in done.buckets))
        return PassReport(
            targets.launches,
            targets.launches - len(targets.planned) + len(done.buckets),
            _reports(graph, done, labels),
            (*targets.left_alone, *done.left),
            *displaced(names, compute_names(graph)),
            gathered_before,
            peak_bytes(lives),
            targets.order.barriers,
            done.schedule,
            done.kept_order,
        )

    def apply(self, graph: fx.Graph, targets: Targets, estimates: Estimates | None = None) -> ManualResult:
        """Change ``graph`` in place; ``estimates`` are for ``schedule = "auto"``, which needs them.

        Raises :class:`PassError` for buckets that cannot be built; ``graph`` is as it was then. Raises :class:`PlanError` for
        what a hook asks for and cannot have, and :class:`PassError` for a graph that breaks; then throw ``graph`` away.
        """
        bucketer = self.bucketer(self.bucket)
        targets = replace(targets, planned=named(targets.planned, bucketer))
        return self._apply(graph, targets, bucketer, estimates)

    def _apply(self, graph: fx.Graph, targets: Targets, bucketer: Bucketer, estimates: Estimates | None) -> ManualResult:
        """``targets`` have the names that ``bucketer`` gives them."""
        ends = targets.ends or (bare_values(graph) if self.overlap.updates == "ready" else None)
        hides = self.bucket.enabled and self.bucket.by == "overlap"
        hiding = hiding_of(targets.order, self.overlap, estimates) if hides else None
        groups = grouping_of(targets.order, targets.planned, bucketer, targets.entries, hiding)
        # Limits of memory count from the graph as it came, without the copies that packs and unpacks make.
        before = peak_of(graph, self.overlap, estimates)
        computes = targets.computes or tuple(computes_of(targets.planned, targets.order))
        buckets = merge(graph, targets.order, [group for group, _ in groups], bucketer)
        # A later run leaves these buckets as they are. If nothing was to be merged now, a later run may still merge.
        if self.bucket.enabled:
            for bucket in buckets:
                bucket.launch.meta[BUCKETED] = True
        updating = update_nodes(graph, *ends) if ends is not None else set()
        scheduler = self.scheduler(self.overlap, graph, buckets, computes)
        refuse_unnamed(scheduler)
        put_on_groups(scheduler)
        if self.overlap.schedule == "auto":
            _refuse_places(scheduler)
            moved = reorder_by_itself(graph, self.overlap, estimates, before)
        else:
            moved = reorder(graph, scheduler, updating)
        left, kept = moved.left, list[tuple[str, str]]()
        # Read before the order is kept, which would make one update need another.
        behind = updates_behind(graph, updating, buckets)
        if self.overlap.insert_overlap_deps:
            pairs = kept_pairs(scheduler, moved.kept)
            meta_of = {node: shared_meta(bucket.members) for bucket in buckets for node in (bucket.launch, *bucket.waits)}
            lost, why = keep_order(graph, pairs, meta_of), "no input of the later one can carry it"
            left += tuple(UntouchedLaunch(f"order of {earlier.name} and {later.name}", why) for earlier, later in lost)
            kept = [(earlier.name, later.name) for earlier, later in dict.fromkeys(pairs) if (earlier, later) not in lost]
        _refuse_broken(graph)
        return ManualResult(
            tuple(buckets), tuple(splits for _, splits in groups), left, tuple(behind), moved.schedule, tuple(kept)
        )


def _refuse_places(scheduler: Scheduler) -> None:
    """A schedule that is found by itself asks nobody for places."""
    for hook in ("launch_before", "wait_before"):
        if overrides(scheduler, hook):
            raise PlanError(f'{hook_name(scheduler, hook)} has no say with schedule = "auto", which finds places by itself')


def _refuse_broken(graph: fx.Graph) -> None:
    try:
        graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise PassError(f"the reordered graph is not in order: {' '.join(str(error).split())[:200]}") from error


def within_room(bucket: Bucket, run: Callable[[Bucket, Estimates | None], _T], estimates: Estimates | None = None) -> _T:
    """What ``run`` gives. If memory has no room, ``by = "overlap"`` lets it run again, on a new graph, with less merged.

    Which launches stay hidden together is decided before anything is merged, when the bytes of packs and unpacks are not known.
    """
    tries = [bucket]
    if bucket.by == "overlap" and bucket.enabled:
        # A cap that is no tighter than the plan's own would merge as much again; 0 is no cap.
        tries += [*(replace(bucket, cap_mb=(cap,)) for cap in _CAPS_MB if not 0 < bucket.cap_mb[0] <= cap)]
        tries.append(replace(bucket, enabled=False))
    for number, one in enumerate(tries[:-1]):
        with suppress(NoRoomError):
            return _settled(one, number, run, estimates)
    return _settled(tries[-1], len(tries) - 1, run, estimates)


def _settled(bucket: Bucket, number: int, run: Callable[[Bucket, Estimates | None], _T], estimates: Estimates | None) -> _T:
    own = estimates and estimates.of_try(number)
    made = run(bucket, own)
    if own is not None:
        own.settle()
    return made


_CAPS_MB = (64.0, 4.0)
_T = TypeVar("_T")


# What our pass says of a graph when all is done.


@dataclass(frozen=True, slots=True)
class ManualResult:
    """What the pass did."""

    buckets: tuple[Merged, ...]
    splits: tuple[tuple[SplitReason, ...], ...]
    """Of each bucket what parted it from others."""
    left: tuple[UntouchedLaunch, ...]
    """What could not be moved."""
    updates: tuple[tuple[str, ...], ...]
    """For each bucket the other entries that have an update between its launch and its first wait."""
    schedule: Schedule | None = None
    kept_order: tuple[tuple[str, str], ...] = ()
    """Names of nodes, (earlier, later), whose order the graph's own edges keep."""


def _reports(graph: fx.Graph, done: ManualResult, labels: Labels) -> tuple[BucketReport, ...]:
    """In order of launch."""
    behind = overlapped(graph, [(bucket.launch, bucket.waits) for bucket in done.buckets], labels)
    found = zip(done.buckets, done.splits, behind, done.updates, strict=True)
    return tuple(_report(*one) for one in sorted(found, key=lambda one: one[0].launch))


def _report(
    bucket: Merged, splits: tuple[SplitReason, ...], behind: OverlappedCompute, updates: tuple[str, ...]
) -> BucketReport:
    first = bucket.first
    dtypes = dict.fromkeys(dtype_name(part.input.meta["val"].dtype) for member in bucket.members for part in member.parts)
    return BucketReport(
        entry=first.entry,
        direction=first.direction,
        kind=first.kind,
        group=str(collectives.argument(bucket.launch, "group_name")),
        op=first.op,
        dtype="+".join(sorted(dtypes)),
        members=tuple(fqn for member in bucket.members for fqn in member.fqns),
        bytes=sum(member.bytes for member in bucket.members),
        launch=bucket.launch.name,
        launches_before=len(bucket.members),
        splits=splits,
        overlap_nodes=behind.nodes,
        overlaps=behind.of,
        updates=updates if first.kind in REDUCTIONS else (),
    )


# The drop-in for torch's function.


_MODES = ("default", "custom_ops", "custom_ops_multidtype")


def manual_overlap_bucketing(
    gm: fx.GraphModule,
    module_bucket_plans: Sequence[str | Sequence[str]],
    insert_overlap_deps: bool = False,
    module_stack_fn: ModuleStackFn | None = None,
    bucket_mode: str | None = None,
    *,
    bucketer: type[Bucketer] = Bucketer,
    scheduler: type[Scheduler] = Scheduler,
    report: Callable[[PassReport], object] | None = None,
) -> fx.GraphModule:
    """Drop-in for torch's function of the same name and call shape: bucket by module, then reorder.

    ``module_bucket_plans``: module FQNs, or lists of FQNs that share a bucket, each as an entry of a plan file
    (``layers.[0-3]``, ``layers.*`` and ``norm+output`` too); without the variable and the modules that wrap the whole model.
    ``module_stack_fn(node)`` gives a node's module stack, outermost first; left out, ``nn_module_stack`` and
    ``fwd_nn_module_stack`` are read. ``bucket_mode``: None, "default" and "custom_ops" all mean this package's pack,
    "custom_ops_multidtype" lets an all-gather carry several dtypes.

    ``bucketer`` and ``scheduler`` are classes of your own to decide by. ``report`` is called with what was done, if there
    is any entry.

    ``gm`` is changed and returned; no entry at all leaves it as it is. On :class:`PlanError` (no list of FQNs, an entry that
    matches no module or no collective or overlaps another, a graph without module names, an unknown mode, a hook that asks for
    what cannot be had), on :class:`PassError` and on whatever a hook raises it is as it was.
    """
    _refuse_other_arguments(gm, insert_overlap_deps, module_stack_fn, bucket_mode)
    _refuse_other_classes(bucketer, scheduler, report)
    entries = parse_entries(module_bucket_plans, "module_bucket_plans")
    if not entries:
        return gm
    with collector.paused():
        graph = without_kept_order(gm.graph)
        if scheduler is not Scheduler and graph is gm.graph:
            # Its hooks may ask for a place that cannot be had, when ``graph`` has been changed already.
            graph = copy.deepcopy(graph)
        targets = by_module(graph, [(entry.name, entry.selectors) for entry in entries], module_stack_fn)
        dtypes = "mixed" if bucket_mode == "custom_ops_multidtype" else "separate"
        rules = Bucket(dtypes=dtypes), Overlap(insert_overlap_deps=insert_overlap_deps)
        own = ManualPass(*rules, bucketer, scheduler)
        if report is None:
            own.apply(graph, targets)
        else:
            report(own.run(graph, targets))
        if graph is gm.graph:
            gm.recompile()
        else:
            gm.graph = graph  # which recompiles
    return gm


def _refuse_other_classes(bucketer: object, scheduler: object, report: object) -> None:
    for name, given, base in (("bucketer", bucketer, Bucketer), ("scheduler", scheduler, Scheduler)):
        if not (isinstance(given, type) and issubclass(given, base)):
            raise PlanError(f"{name} must be a subclass of pytest_fxbucket.passes.{base.__name__}, not {show(given)}")
    if report is not None and not callable(report):
        raise PlanError(f"report must be callable(report) or None, not {show(report)}")


def _refuse_other_arguments(gm: object, insert_overlap_deps: object, module_stack_fn: object, bucket_mode: object) -> None:
    from torch import fx

    if not isinstance(gm, fx.GraphModule):
        raise PlanError(f"gm must be a torch.fx.GraphModule, not a value of type {type(gm).__name__}")
    if not isinstance(insert_overlap_deps, bool):
        raise PlanError(f"insert_overlap_deps must be True or False, not {show(insert_overlap_deps)}")
    if module_stack_fn is not None and not callable(module_stack_fn):
        raise PlanError(f"module_stack_fn must be callable(node) or None, not {show(module_stack_fn)}")
    if bucket_mode is None or bucket_mode in _MODES:
        return
    known = one_or_other([show(mode) for mode in _MODES])
    if bucket_mode == "coalesced":
        raise PlanError(
            f'bucket_mode "coalesced" is refused: a bucket is one tensor here, not one call of several; use {known}'
        )
    near = nearest(bucket_mode, list(_MODES)) if isinstance(bucket_mode, str) else ""
    raise PlanError(f"bucket_mode must be None, {known}, not {show(bucket_mode)}{near}")
