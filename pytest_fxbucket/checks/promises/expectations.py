"""The promises of a plan for every graph, and the terms in which audits sort its buckets: kinds, rounds, stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.plan.factories import dtype_named
from pytest_fxbucket.plan.schema_bucket import Bucket as BucketTable
from pytest_fxbucket.plan.schema_bucket import Overlap
from pytest_fxbucket.plan.selectors import GatherAgain, entry_by_parameter
from pytest_fxbucket.step.graph_sequence import is_handed_on
from pytest_fxbucket.step.mesh import mesh_with
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.selectors import Resolution
    from pytest_fxbucket.step.roles import Direction, Parameter, StepGraph

KINDS = ("all_gather", *REDUCTIONS)
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Expectations:
    """What a plan promises of every graph."""

    entry_of: Mapping[str, str]
    """FQN to entry, planned parameters only."""
    registration: tuple[str, ...]
    """FQNs of planned parameters in the order of FSDP2's units, then all others."""
    own_dtype: Mapping[str, torch.dtype]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard_after_forward: GatherAgain
    bucket: BucketTable = field(default_factory=BucketTable)
    overlap: Overlap = field(default_factory=Overlap)
    is_traced_here: bool = True
    """Whether this package captured the graph. If not, and the plan is silent, the given graph says what is gathered again."""
    entries: tuple[str, ...] = ()
    """In the plan's order."""
    ranks_of: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ranks of each process group, by its name, as far as they are known."""
    tp_group: str = ""
    """Name of the process group on which gradients are summed before they are cast to reduce_dtype; empty without tp."""

    def ranks(self, bucket: Bucket) -> int:
        """How many ranks ``bucket`` runs on; 0 if that is not known."""
        return len(self.ranks_of.get(bucket.group, ()))

    def is_planned(self, fqn: str) -> bool:
        """Whether the plan says anything of the parameter ``fqn``; a plan that buckets by size speaks of all."""
        return not self.bucket.has_entries or fqn in self.entry_of

    def entries_of(self, fqns: Iterable[str]) -> list[str]:
        """The entries of ``fqns``, each once; a parameter in no entry stands for itself, and an activation for nothing."""
        return list(dict.fromkeys(self.entry_of.get(fqn, fqn) for fqn in fqns if fqn))


def promise_of(
    plan: Plan,
    parameters: Sequence[Parameter],
    resolution: Resolution,
    ranks_of: Mapping[str, Sequence[int]] | None = None,
) -> Expectations:
    """The promises of ``plan`` for a step with ``parameters``, in order of registration; ``ranks_of``: ranks by group name."""
    planned = entry_by_parameter(resolution.entries)
    return Expectations(
        entry_of=planned,
        registration=tuple(dict.fromkeys([*planned, *(parameter.fqn for parameter in parameters)])),
        own_dtype={parameter.fqn: parameter.dtype for parameter in parameters},
        param_dtype=dtype_named(plan.parallel.param_dtype),
        reduce_dtype=dtype_named(plan.parallel.reduce_dtype),
        bucket=plan.bucket,
        overlap=plan.overlap,
        reshard_after_forward=plan.parallel.reshard_after_forward,
        is_traced_here=plan.graph is None,
        entries=tuple(entry.name for entry in resolution.entries),
        ranks_of=ranks_of or {},
        tp_group=mesh_with(plan.degrees, plan.parallel.ep).group("tp").name if plan.parallel.tp > 1 else "",
    )


def of_kind(reading: GraphAnalysis, direction: Direction, kind: str) -> list[Bucket]:
    """Buckets of one direction and kind, in order of their launches."""
    return [bucket for bucket in reading.buckets if bucket.direction == direction and bucket.kind == kind]


def by_round(buckets: Sequence[Bucket]) -> dict[int, list[Bucket]]:
    """``buckets`` by their rounds, the first round first; each in the order that they have."""
    rounds: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        rounds.setdefault(bucket.round, []).append(bucket)
    return dict(sorted(rounds.items()))


def of_round(number: int) -> str:
    """``, round 2`` for the second round; empty for the first, as most steps have only that."""
    return f", round {number + 1}" if number else ""


def stages_of(promise: Expectations, buckets: Sequence[Bucket], when: Callable[[Bucket], int]) -> dict[str, list[Bucket]]:
    """Planned buckets that are waited for, by entry, in order of ``when``; a launch of several entries counts for each.

    In a plan that buckets by size each bucket is a stage of its own.
    """
    stages: dict[str, list[Bucket]] = {}
    for bucket in sorted(buckets, key=when):
        entries = [promise.entry_of.get(fqn, "") for fqn in bucket.fqns]
        if not promise.bucket.has_entries:
            entries = [f"of {some(bucket.fqns)}"]
        for entry in dict.fromkeys(entries):
            if entry and bucket.wait is not None:
                stages.setdefault(entry, []).append(bucket)
    return stages


def kept_apart(promise: Expectations, step: StepGraph) -> tuple[Expectations, str]:
    """``promise`` without what graphs that run apart cannot keep, and a clause on what was left out; empty if nothing was.

    Launches placed by hand stay in: if the compute that one names is not in its graph, the pass itself refuses it.
    """
    if not is_handed_on(step):
        return promise, ""
    names = (
        ["overlap with compute"] if promise.reshard_after_forward is None else ["overlap with compute", "reshard_after_forward"]
    )
    said = f"left out, since whoever calls the graphs decides it: {' and '.join(names)}"
    return replace(promise, reshard_after_forward=None), said
