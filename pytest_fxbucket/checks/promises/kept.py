"""Does the graph keep what the plan promises? Read from the graph that came out of the pass, without any golden.

- Entries: each is one launch for each direction, kind, group and dtype, with exactly its parameters in the layout asked for.
- Schedule: prefetch depth, deferred reduction waits, overlap with compute.
- Numbers: dtypes are as asked, and no value goes through a narrower dtype on its way.
- All around: compute reads what it read before the pass, and there is no launch that the graph before did not have.
- Optimizer: updates stand where they should, and are made of the same gradients and inputs as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promises.expectations import DIRECTIONS, Expectations, of_kind
from pytest_fxbucket.checks.promises.foreign import ChangesOutsideBuckets, stayed_computes
from pytest_fxbucket.checks.promises.gathered import memory_problems
from pytest_fxbucket.checks.promises.launches import launch_problems
from pytest_fxbucket.checks.promises.order import launch_order_problems
from pytest_fxbucket.checks.promises.prefetch import overlap_problems
from pytest_fxbucket.checks.promises.updates import update_problems
from pytest_fxbucket.compat.c10d import twin_name, untwinned
from pytest_fxbucket.golden.schedule import nameless_text
from pytest_fxbucket.graph.compute import multiplies
from pytest_fxbucket.graph.contents import MANTISSA_BITS
from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.graph.order import displaced
from pytest_fxbucket.graph.preserved import alignment
from pytest_fxbucket.plan.selectors import kept_entries
from pytest_fxbucket.words import counted, some, times

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member

MOST_DISPLACED = 0.05
"""Share of the nodes that neither communicate nor move data that may stand in another order than before."""


def audit(
    promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis, beside: ChangesOutsideBuckets | None = None
) -> list[str]:
    """Every broken promise of ``passed``, one sentence each; ``captured`` is the graph before the pass.

    The changes in ``beside`` are no matter of the plan, and left out.
    """
    if captured.problems:
        return [f"the graph before the pass cannot be read: {problem}" for problem in captured.problems]
    found = [f"the graph cannot be followed: {problem}" for problem in passed.problems]
    found += launch_problems(promise, captured, passed)
    found += _new_launches(captured, passed)
    found += _others(captured, passed, beside)
    found += resharding_problems(promise, captured, passed)
    found += _numbers(promise, captured, passed)
    found += _sizes(captured, passed)
    if promise.overlap.schedule == "manual":
        found += overlap_problems(promise, captured, passed)
        found += memory_problems(promise, captured, passed)
        found += launch_order_problems(promise, captured, passed)
    found += update_problems(promise, captured, passed)
    if not passed.problems:
        found += _readers(captured, passed, beside)
    found += _moved(promise, captured, passed)
    return list(dict.fromkeys(found))


def _new_launches(captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """A parameter is sent in a direction only if it was before: nobody promised, or paid for, the launch else."""
    before = {(one.direction, one.kind, fqn) for one in captured.buckets for fqn in one.fqns}
    for one in passed.buckets:
        if new := [fqn for fqn in one.fqns if fqn and (one.direction, one.kind, fqn) not in before]:
            yield f"{one.direction} {one.kind} of {some(new)} is new: there was none before the pass"


def _others(captured: GraphAnalysis, passed: GraphAnalysis, beside: ChangesOutsideBuckets | None) -> Iterator[str]:
    """Launches of no parameter and no gradient must be as many as before, by kind and size, except those that were split."""
    parted = {} if beside is None else _parted(captured, passed)
    before, after = (
        Counter(_describe(one) for one in reading.buckets if not any(one.fqns) and _kind(one) not in parted)
        for reading in (captured, passed)
    )
    for what in sorted({*before, *after}):
        if before[what] != after[what]:
            yield f"{what} of no parameter is launched {times(after[what])}, {times(before[what])} before the pass"


def left_out(captured: GraphAnalysis, passed: GraphAnalysis, beside: ChangesOutsideBuckets) -> list[str]:
    """The changes that audit leaves out, a clause each."""
    return [*beside.left_out_clauses(), *_parted(captured, passed).values()]


def _parted(captured: GraphAnalysis, passed: GraphAnalysis) -> dict[str, str]:
    """Clauses by kind of launches of no parameter and no gradient that were split: as many elements as before, other parts."""
    before, after = _by_kind(captured), _by_kind(passed)
    return {
        what: f"{what} of no parameter in {counted(len(after[what]), 'launch')}, {len(was)} before the pass"
        for what, was in before.items()
        if was != after.get(what, []) and sum(was) == sum(after.get(what, []))
    }


def _by_kind(reading: GraphAnalysis) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in reading.buckets:
        if not any(one.fqns):
            found.setdefault(_kind(one), []).append(one.numel)
    return {what: sorted(sizes) for what, sizes in found.items()}


def _kind(bucket: Bucket) -> str:
    return f"{bucket.kind}{' ' + bucket.op if bucket.op else ''} in {dtype_name(bucket.dtype)} on group {bucket.group}"


def _describe(bucket: Bucket) -> str:
    return f"{bucket.kind}{' ' + bucket.op if bucket.op else ''} of {bucket.numel} elements in {dtype_name(bucket.dtype)}"


def _numbers(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """Dtypes must be as asked, reductions as before, and no value rounded to fewer bits; a sentence for a bucket and fault."""
    before = _Before(captured)
    for bucket in passed.buckets:
        faults: dict[str, list[str]] = {}
        for member in bucket.members:
            known = before.of(bucket, member.fqn)
            for fault in _faults(promise, bucket, member, *known) if known else ():
                faults.setdefault(fault, []).append(member.fqn or nameless_text(bucket))
        for fault, fqns in faults.items():
            yield f"{bucket.direction} {bucket.kind} of {some(fqns)} {fault}"


def _faults(promise: Expectations, bucket: Bucket, member: Member, old: Bucket, old_member: Member) -> Iterator[str]:
    # Where the plan says nothing, the dtype from before the pass is to stay.
    wanted = _dtype(promise, bucket, member.fqn) or old.dtype
    if member.dtype != wanted:
        yield f"is launched in {dtype_name(member.dtype)}, expected {dtype_name(wanted)}"
    elif member.precision < old_member.precision:
        yield f"is squeezed through {_through(member.precision, wanted)} on its way, expected {dtype_name(wanted)}"
    if bucket.op != old.op:
        yield f"reduces by {bucket.op}, expected {old.op}"
    own = (
        promise.overlap.gather_group in ("own", bucket.direction)
        and bucket.kind == "all_gather"
        and promise.is_planned(member.fqn)
        and not old.unmergeable
    )
    if own and bucket.group != twin_name(old.group):
        yield f'does not run on a process group of its own, though gather_group = "{promise.overlap.gather_group}"'
    elif not own and bucket.group != old.group:
        yield "runs on another process group than before the pass"


def _sizes(captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """Each launch must carry as many bytes as its members had, and no filling but what aligns members of several dtypes."""
    # Filling is bounded from above only: less than one alignment step before each member, in each rank's part.
    before = _Before(captured)
    for bucket in passed.buckets:
        known = [(member, before.of(bucket, member.fqn)) for member in bucket.members]
        if not known or not all(old and member.fqn for member, old in known):
            continue
        wanted = sum(old[1].numel * old[0].parts * member.dtype.itemsize for member, old in known if old)
        filling = (alignment(bucket) - 1) * bucket.parts * len(known)
        if not wanted <= bucket.bytes <= wanted + filling:
            what = f"{bucket.direction} {bucket.kind} of {some(bucket.fqns)}"
            yield f"{what} moves {bucket.bytes} bytes, its members have {wanted}"


class _Before:
    """Members of the graph before the pass."""

    def __init__(self, captured: GraphAnalysis) -> None:
        self.found: dict[tuple[str, str, str], list[tuple[Bucket, Member]]] = {}
        for bucket in captured.buckets:
            for member in bucket.members:
                self.found.setdefault((bucket.direction, bucket.kind, member.fqn), []).append((bucket, member))

    def of(self, bucket: Bucket, fqn: str) -> tuple[Bucket, Member] | None:
        """Launch and member of ``fqn`` before the pass, of ``bucket``'s direction and kind; of several, that on its group."""
        known = self.found.get((bucket.direction, bucket.kind, fqn), [])
        same = [one for one in known if one[0].group == untwinned(bucket.group)]
        return next(iter(same or known), None)


def _readers(captured: GraphAnalysis, passed: GraphAnalysis, beside: ChangesOutsideBuckets | None) -> Iterator[str]:
    """Compute that stayed must read the parameters, and make the gradients, that it did before the pass."""
    for fqn, dtypes in sorted(set(passed.seen_as) - set(captured.seen_as)):
        yield f"compute reads the bits of {fqn}, {dtypes}, which it did not before the pass"
    for direction in (*DIRECTIONS, "optimizer"):
        both = (stayed_computes(reading, beside) for reading in (captured, passed))
        old, new = ([(key, fqn) for of, fqn, key in one if of == direction] for one in both)
        if beside is not None:  # then each is known by its node, wherever that stands
            old, new = (sorted(one, key=str) for one in (old, new))
        before, after = (Counter(fqn for _, fqn in one) for one in (old, new))
        for fqn in sorted({*before, *after}):
            if before[fqn] != after[fqn]:
                yield f"{direction} compute uses {fqn} {times(after[fqn])}, {times(before[fqn])} before the pass"
        if before == after and old != new and direction != "optimizer":  # what updates read is told by what they make
            (used, was), (uses, now) = next((x, y) for x, y in zip(old, new, strict=True) if x != y)
            if was == now and used and uses:
                yield f"{direction} compute uses {now} at {uses[0]}, and not at {used[0]} as before the pass"
            else:
                yield (
                    f"{direction} compute uses {now} where it used {was} before the pass: two members are swapped, "
                    "or compute moved"
                )


def _moved(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """Compute must nearly keep its order: a pass has to move collectives. Nothing is said of a pass that renames its nodes.

    Exempt are updates that are to stand where they are ready, and in an automatic schedule all compute but matrix products.
    """
    if promise.overlap.schedule == "auto":
        yield from _products_moved(captured, passed)
        return
    free = captured.updating_names if promise.overlap.updates == "ready" else frozenset[str]()
    before, after = ([name for name in one.names if name not in free] for one in (captured, passed))
    moved, of = displaced(before, after)
    # In a small graph that share is less than a node, so four may always move.
    if of > len(before) // 2 and moved > max(of * MOST_DISPLACED, 4):
        most = f"at most {MOST_DISPLACED:.0%} may"
        yield f"{moved} of {of} compute nodes stand in another order than before the pass; {most}"


def _products_moved(captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """Products of matrices must keep their order in an automatic schedule; light compute may be put off with its inputs."""
    if captured.order is None or passed.order is None:
        return
    before, after = ([node.name for node in one.order.nodes if multiplies(node)] for one in (captured, passed) if one.order)
    moved, of = displaced(before, after)
    if of > len(before) // 2 and moved:
        yield f"{moved} of {of} products of matrices stand in another order than before the pass"


def _dtype(promise: Expectations, bucket: Bucket, fqn: str) -> torch.dtype | None:
    if not fqn:
        return None  # an activation, of which the plan says nothing
    own = promise.own_dtype.get(fqn)
    if own is not None and own.is_complex:
        return own  # a real dtype would lose half of it
    if bucket.kind == "all_gather":
        return promise.param_dtype or own
    # FSDP2 sums gradients over tp first, as they are, and casts what it reduces itself
    return None if bucket.group == promise.tp_group else promise.reduce_dtype


def _through(bits: int, wanted: torch.dtype) -> str:
    kind = (dtype for dtype, size in MANTISSA_BITS.items() if size == bits and dtype.is_complex == wanted.is_complex)
    return next(map(dtype_name, kind), f"{bits} bits") if bits else "0 bits"  # which integers leave, too


# Are parameters that forward gathered gathered again in backward, or kept until then, as the plan has it for each entry?


def resharding_problems(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """A sentence on parameters kept that should be gathered again, and one on parameters gathered again that should be kept."""
    kept = _kept_parameters(promise, captured)
    asked = (
        "reshard_after_forward = {}" if isinstance(promise.reshard_after_forward, bool) else "reshard_after_forward is {} there"
    )
    read = [
        member.fqn
        for bucket in of_kind(passed, "forward", "all_gather")
        if bucket.backward_use is not None
        for member in bucket.members
        # Backward may read some members of a bucket alone, so the last reader of each is asked.
        if (member.last_use or 0) >= bucket.backward_use and promise.is_planned(member.fqn) and member.fqn not in kept
    ]
    if read:
        yield f"{asked.format('true')}, but backward reads forward's gather of {some(list(dict.fromkeys(read)))}"
    again = [fqn for bucket in of_kind(passed, "backward", "all_gather") for fqn in bucket.fqns if fqn in kept]
    if again:
        yield f"{asked.format('false')}, but backward gathers {some(again)} again"


def _kept_parameters(promise: Expectations, captured: GraphAnalysis) -> set[str]:
    """FQNs of parameters that should stay gathered until backward."""
    asked = promise.reshard_after_forward
    if isinstance(asked, bool):
        return set() if asked else {fqn for fqn in promise.registration if fqn}
    if asked is None and not promise.is_traced_here:
        gathers = of_kind(captured, "forward", "all_gather")
        return {fqn for bucket in gathers if bucket.backward_use is not None for fqn in bucket.fqns}
    last = captured.last_read(promise.entry_of)
    roots = last and promise.entry_of[last], promise.bucket.root
    kept = kept_entries(asked, list(dict.fromkeys(promise.entry_of.values())), roots)
    return {fqn for fqn, entry in promise.entry_of.items() if entry in kept}
