"""Our pass: merges the collectives of each entry of a module plan, and reorders launches and waits.

The same job as torch's ``torch._inductor.fx_passes.overlap_manual_scheduling``; written anew, and an error where that one does
nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.graph.hazards import refuse_writes
from pytest_fxbucket.passes.overlap import defer_reductions, prefetch_gathers
from pytest_fxbucket.passes.pack import Merged, merge
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.targets import ModuleStackFn, Target, Targets, by_module

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, slots=True)
class ManualPass:
    """Merge and reorder the launches that a plan names."""

    merging: bool = True
    """Merge an entry's launches; otherwise they are only reordered."""
    layout: Literal["registration", "execution"] = "registration"
    """Byte order of a bucket's members: of the parameters' registration, or of the launches."""
    prefetch: int = 1
    """How many stages ahead an all-gather is launched; 0 leaves it where it was."""
    defer_reduce: bool = True
    """Wait for reductions behind the next stage's launches."""

    def run(self, graph: fx.Graph, targets: Targets) -> PassReport:
        """Change ``graph`` in place. Raises :class:`PassError` for what is not safe; then throw ``graph`` away."""
        refuse_writes(graph, [target.launch for target in targets.planned])
        buckets = [merge(graph, members) for members in self._groups(targets.planned)]
        left = list(targets.left_alone)
        left += prefetch_gathers(buckets, "forward", self.prefetch)
        left += prefetch_gathers(buckets, "backward", self.prefetch)
        if self.defer_reduce:
            left += defer_reductions(buckets)
        _refuse_broken(graph)
        removed = len(targets.planned) - len(buckets)
        return PassReport(targets.launches, targets.launches - removed, tuple(_report(b) for b in buckets), tuple(left))

    def _groups(self, planned: Sequence[Target]) -> list[list[Target]]:
        """Members of each bucket in byte order, buckets in order of their first launch."""
        groups: dict[tuple[str, ...], list[Target]] = {}
        for target in sorted(planned, key=lambda target: target.launch):
            key = target.key if self.merging else (*target.key, target.launch.name)
            groups.setdefault(key, []).append(target)
        if self.layout == "registration":
            return [sorted(group, key=lambda target: target.rank_in_registration) for group in groups.values()]
        return list(groups.values())


def _refuse_broken(graph: fx.Graph) -> None:
    try:
        graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise PassError(f"the reordered graph is not in order: {' '.join(str(error).split())[:200]}") from error


_MODES = {None, "default", "custom_ops"}
_MODES_NOT_BUILT = {"custom_ops_multidtype", "coalesced"}


def manual_overlap_bucketing(
    gm: fx.GraphModule,
    module_bucket_plans: Sequence[str | Sequence[str]],
    insert_overlap_deps: bool = False,
    module_stack_fn: ModuleStackFn | None = None,
    bucket_mode: str | None = None,
) -> fx.GraphModule:
    """Drop-in for torch's function of the same name and call shape: bucket by module, then reorder.

    ``module_bucket_plans``: module FQNs, or lists of FQNs that share a bucket. ``module_stack_fn(node)`` gives a node's module
    stack, outermost first; left out, ``nn_module_stack`` and ``fwd_nn_module_stack`` are read. ``bucket_mode``: None, "default"
    and "custom_ops" all mean this package's pack. ``gm`` is changed and returned; on :class:`PlanError` (an entry that matches
    nothing, overlaps, a mode that is unknown or not built) or :class:`PassError` it is as it was.
    """
    if bucket_mode in _MODES_NOT_BUILT:
        raise PlanError(f"bucket_mode {bucket_mode!r} is not built yet; use 'custom_ops'")
    if bucket_mode not in _MODES:
        raise PlanError(f"bucket_mode {bucket_mode!r} is unknown; known are 'default' and 'custom_ops'")
    if insert_overlap_deps:
        raise PlanError("insert_overlap_deps = True is not built yet; use False")
    graph = copy.deepcopy(gm.graph)
    targets = by_module(graph, _module_plans(module_bucket_plans), module_stack_fn)
    ManualPass().run(graph, targets)
    gm.graph = graph
    gm.recompile()
    return gm


def _module_plans(plans: Sequence[str | Sequence[str]]) -> list[tuple[str, list[str]]]:
    """(entry, module FQNs) of each plan. Raises :class:`PlanError` for what is no list of FQNs, and for overlaps."""
    if not isinstance(plans, (list, tuple)) or not plans:
        raise PlanError(f"module_bucket_plans must be a list of at least one module FQN or list of them, not {plans!r}")
    found: list[tuple[str, list[str]]] = []
    owner: dict[str, str] = {}
    for plan in plans:
        names = [plan] if isinstance(plan, str) else plan
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n.strip() for n in names):
            raise PlanError(f"entry {plan!r} of module_bucket_plans must be a module FQN or a list of them")
        entry = "+".join(names)
        for name in names:
            clash = next((n for n in owner if _covers(n, name) or _covers(name, n)), None)
            if clash is not None:
                raise PlanError(f"entry {entry!r} overlaps entry {owner[clash]!r}: {name} and {clash} share modules")
            owner[name] = entry
        found.append((entry, list(names)))
    return found


def _covers(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(outer + ".")


def _report(bucket: Merged) -> BucketReport:
    first = bucket.first
    return BucketReport(
        entry=first.entry,
        direction=first.direction,
        kind=first.kind,
        group=first.group,
        op=first.op,
        dtype=str(first.dtype).removeprefix("torch."),
        members=tuple(member.fqn for member in bucket.members),
        bytes=sum(member.bytes for member in bucket.members),
    )
