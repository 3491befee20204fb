"""Judges what the ranks saw: equal graphs, data that could show a wrong pass, equal bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from pytest_fxbucket.checks.bitwise.job import BitwiseOutcome, TensorDifference
    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.ranks.failure import RankFailure
    from pytest_fxbucket.step.mesh import Mesh


class RankComparison(Protocol):
    """The outcome of a rank that compared tensors."""

    digests: tuple[str, ...]
    differences: list[TensorDifference]


_SHOWN = 12
WORDS = {"grad": "gradient of", "param": "new value of parameter", "state": "state"}
"""What people call outputs by their roles."""
RUNS = ("unbucketed", "bucketed")
"""Names of the two runs: the first word of a rank's mark, which says where in its job it is."""


def idle(outcomes: Sequence[BitwiseOutcome]) -> set[str]:
    """Parameters whose gradients are zero on every rank in every step."""
    return set.intersection(*(set(outcome.zero) for outcome in outcomes))


def unusable_data(
    outcomes: Sequence[BitwiseOutcome],
    may_be_idle: Collection[str] = (),
    reading: Sequence[Sequence[int]] | None = None,
    key: str = "[model] may_be_idle",
) -> list[str]:
    """Why the data could not tell a right pass from a wrong one, one sentence each; empty if it can.

    ``may_be_idle`` are parameters whose gradients may be zero by the plan's key ``key``. ``reading`` are sets of
    ranks that read one part of their sequences, and empty if a step has one batch; left out, all ranks are one.
    """
    found = []
    if unasked := idle(outcomes).difference(may_be_idle):
        found.append(
            f"the gradient of {some(sorted(unasked))} is zero on every rank in every step, so nothing about it was checked; "
            f"give the batch or the loss values that reach it, or, if it may get none, name it in {key}"
        )
    infinite = sorted({fqn for outcome in outcomes for fqn in outcome.not_finite})
    if infinite:
        found.append(f"the values of {some(infinite)} are not finite, so equal bits mean nothing; scale batch or loss")
    # A parameter whose gradient may be zero may stay as it is.
    still = set.intersection(*(set(outcome.still) for outcome in outcomes)) - idle(outcomes).intersection(may_be_idle)
    if still:
        found.append(
            f"the optimizer leaves {some(sorted(still))} as it was on every rank in every step, so nothing about its update "
            "was checked; give it a learning rate that moves it"
        )
    sets = ([range(len(outcomes))] if len(outcomes) > 1 else []) if reading is None else reading
    for step in range(min(len(outcome.batches) for outcome in outcomes) if sets else 0):
        if all(len({outcomes[rank].batches[step] for rank in ranks}) == 1 for ranks in sets):
            found.append(f"all ranks got the same batch in step {step}, which hides a wrong reduction; use the rank in it")
            break
    return found


def wrong_graphs(outcomes: Sequence[RankComparison], checked: Sequence[tuple[str, ...]]) -> list[str]:
    """A sentence for each rank that ran another graph than the one that was checked, by their digests."""
    return [
        f"rank {rank} ran another graph than the one that was checked"
        for rank, (outcome, digests) in enumerate(zip(outcomes, checked, strict=True))
        if outcome.digests != digests
    ]


def never_clipped(
    outcomes: Sequence[BitwiseOutcome], clip_norm: float, copies: Mapping[str, Sequence[Sequence[int]]]
) -> list[str]:
    """Why clipping to ``clip_norm`` was not checked: no step's gradients are larger; ``copies``: ranks that hold the same."""
    # The norm over all ranks; a gradient of which several ranks hold the same counts once.
    share = {(fqn, rank): len(ranks) for fqn, sets in copies.items() for ranks in sets for rank in ranks}
    norms = [
        sum(
            square / share.get((fqn, rank), 1) for rank, one in enumerate(outcomes) for fqn, square in one.squares[step].items()
        )
        ** 0.5
        for step in range(len(outcomes[0].squares))
    ]
    if not clip_norm or max(norms) > clip_norm:
        return []
    return [
        f"clip_norm = {clip_norm:g} never clips, so nothing about it was checked: the largest norm of the gradients is "
        f"{max(norms):.3g} in {len(norms)} steps; set it below that, or leave it out"
    ]


def differing_losses(outcomes: Sequence[BitwiseOutcome], sharing: Sequence[Sequence[int]], is_placed: bool) -> list[str]:
    """A sentence on ranks whose losses differ though they must not; ``sharing`` are the sets of ranks that share a loss.

    They do so by the placements of the user's graph if ``is_placed``, else since they have one batch.
    """
    for ranks in sharing:
        other = next((rank for rank in ranks if outcomes[rank].losses != outcomes[ranks[0]].losses), None)
        if other is not None:
            if is_placed:
                return [f"ranks {ranks[0]} and {other} have other losses, which by its placements are the same"]
            return [
                f"ranks {ranks[0]} and {other} have one batch, since tp parts them, but other losses: what a rank has a part "
                "of reaches the loss; sum it over tp, as rowwise linears do"
            ]
    return []


def differing_copies(outcomes: Sequence[BitwiseOutcome], copies: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    """Sentences on parameters and buffers that differ between ranks and must not; ``copies``: ranks that hold the same."""
    # Whole tensors as the factory built them come first: if those differ, so does everything that is made of them.
    for fqn in outcomes[0].built:
        if other := next((rank for rank, one in enumerate(outcomes) if one.built.get(fqn) != outcomes[0].built[fqn]), None):
            return [
                f"the model's factory gave another {fqn} on rank {other} than on rank 0; it must give the same model on every "
                "rank, so draw from torch's generator, which is seeded alike, and from nothing that depends on the rank"
            ]
    found: dict[tuple[int, int], list[str]] = {}
    for fqn, sets in copies.items():
        for ranks in sets:
            first = outcomes[ranks[0]].parameter_digests.get(fqn)
            other = next((rank for rank in ranks if outcomes[rank].parameter_digests.get(fqn) != first), None)
            if other is not None:
                found.setdefault((ranks[0], other), []).append(fqn)
                break
    return [
        f"ranks {a} and {b} hold copies of {some(fqns)}, which differ after the last step: "
        "their gradients were not reduced alike"
        for (a, b), fqns in found.items()
    ]


def buckets_at_hand(
    failure: RankFailure,
    readings: Mapping[int, Sequence[GraphAnalysis]],
    members_of: Mapping[str, tuple[int, ...]],
    entry_of: Mapping[str, str],
    runs: Sequence[str],
) -> dict[int, str]:
    """Rank -> the bucket of the collective that it launched or waits for; ranks that are in no step's collective are left out.

    ``readings`` are those of each rank's graphs, in the order of ``runs``. ``members_of`` has the ranks of each process group
    by the name that the graphs use.
    """
    # The flight record numbers the launches of a process group from 1 in each step, so the n-th bucket on that group is the
    # one. Groups are matched by their names: a group and its twin have the same members. Over NCCL the record has no names and
    # numbers the launches of both together, so there members are what tells groups apart.
    found = {}
    for state in failure.states:
        where, run = state.where, state.where.mark.partition(" ")[0]
        if where.at is None or run not in runs:
            continue
        group = where.groups[where.at.group]
        reading = readings[state.rank][runs.index(run)]
        buckets = [
            bucket
            for bucket in reading.buckets
            if (bucket.group == group.name if group.name else members_of.get(bucket.group) == group.members)
        ]
        if where.at.number <= len(buckets):
            found[state.rank] = _named(buckets[where.at.number - 1], entry_of)
    return found


def _named(bucket: Bucket, entry_of: Mapping[str, str]) -> str:
    entries = sorted({entry_of.get(fqn, fqn) for fqn in bucket.fqns if fqn})
    return f"bucket {' and '.join(entries) or 'of no parameter'}, {bucket.direction}"


def first_step(outcomes: Sequence[RankComparison]) -> int | None:
    """First step in which any rank saw a difference; None if all bits are equal."""
    return min((d.step for outcome in outcomes for d in outcome.differences), default=None)


def difference_lines(
    outcomes: Sequence[RankComparison], bucket_of: Mapping[str, str], stages_of: Mapping[str, str] = {}
) -> list[str]:
    """The first step's differences, a line each: what, where, how much; ``stages_of``: stages by FQN, of the loss by ''."""
    step = first_step(outcomes)
    found = [d for outcome in outcomes for d in outcome.differences if d.step == step]
    found.sort(key=lambda d: (("loss", "gradient", "parameter").index(d.what) if d.what in _ORDER else 3, d.rank))
    lines = [difference_line(difference, bucket_of, stages_of) for difference in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"... and {len(found) - _SHOWN} more tensors in step {step}")
    return lines


_ORDER = ("loss", "gradient", "parameter")


def first_node_lines(outcomes: Sequence[BitwiseOutcome]) -> list[str]:
    """Where the two runs part: the first node whose bits differ, and on which ranks."""
    # Clean-up runs behind the other graph of its step, so a node of it comes last whatever its position.
    nodes = {rank: (one.first.graph, one.first.node) for rank, one in enumerate(outcomes) if one.first.node is not None}
    if not nodes:
        gone = dict.fromkeys(f"{name} ({target})" for one in outcomes for name, target in one.first.gone)
        lost = f", or since it took out {some(list(gone))}" if gone else ""
        return [f"no node that both graphs have differs: the difference arises in nodes that the pass made{lost}"]
    first = min(nodes.values(), key=lambda node: (node[0] == "cleanup", node[1][0]))
    graph, (position, name, target) = first
    ranks = ", ".join(str(rank) for rank, node in nodes.items() if node == first)
    of = f"the {graph} graph" if graph == RUNS[1] else f"graph {graph}"
    return [f"first node whose bits differ: {name} ({target}), node {position} of {of}, on rank {ranks}"]


def crossed_lines(outcomes: Sequence[BitwiseOutcome], mesh: Mesh) -> list[str]:
    """A sentence on the first value that a pipeline stage received otherwise than its neighbour made it; empty without one."""
    for rank, outcome in enumerate(outcomes):
        made = {of: digest for other in mesh.ranks(rank, "pp") for of, digest in outcomes[other].sent_digests.items()}
        for (direction, stage, microbatch, name), digest in outcome.received.items():
            # A value that no rank says it made has nothing to be compared with.
            if made.get((direction, stage, microbatch, name), digest) != digest:
                receiver = stage + 1 if direction == "forward" else stage - 1
                of = f"{name} of microbatch {microbatch}"
                return [f"stage {receiver} received another {of} than stage {stage} made, on rank {rank}"]
    return []


def difference_line(difference: TensorDifference, bucket_of: Mapping[str, str], stages_of: Mapping[str, str] = {}) -> str:
    """What differs where, and by how much."""
    bucket = f" (bucket {bucket_of[difference.fqn]})" if difference.fqn in bucket_of else ""
    ulps = f", up to {difference.ulps} ULP" if difference.ulps >= 0 else ""
    name = f" {difference.fqn}" if difference.fqn else ""
    if difference.what in _ORDER and difference.fqn in stages_of:
        name += f" of {stages_of[difference.fqn]}"
    return (
        f"step {difference.step}, rank {difference.rank}: {difference.what}{name}{bucket}: "
        f"{difference.elements} of {difference.numel} elements differ{ulps}"
    )
