"""Is what forward gathered gathered again in backward, or kept, as each entry of the plan has it?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promise import Promise, of_kind
from pytest_fxbucket.plan.reshard import kept_entries
from pytest_fxbucket.units import some

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Reading


def resharding_problems(promise: Promise, captured: Reading, passed: Reading) -> Iterator[str]:
    """A sentence for what is kept though it should not be, and one for what is gathered again though it should be kept."""
    kept = _kept(promise, captured)
    asked = (
        "reshard_after_forward = {}" if isinstance(promise.reshard_after_forward, bool) else "reshard_after_forward is {} there"
    )
    read = [
        fqn
        for bucket in of_kind(passed, "forward", "all_gather")
        if bucket.backward_use is not None
        for fqn in bucket.fqns
        if promise.is_planned(fqn) and fqn not in kept
    ]
    if read:
        yield f"{asked.format('true')}, but backward reads forward's gather of {some(list(dict.fromkeys(read)))}"
    again = [fqn for bucket in of_kind(passed, "backward", "all_gather") for fqn in bucket.fqns if fqn in kept]
    if again:
        yield f"{asked.format('false')}, but backward gathers {some(again)} again"


def _kept(promise: Promise, captured: Reading) -> set[str]:
    """FQNs whose gathers backward reads, too."""
    asked = promise.reshard_after_forward
    if isinstance(asked, bool):
        return set() if asked else {fqn for fqn in promise.registration if fqn}
    if asked is None and not promise.is_traced_here:
        gathers = of_kind(captured, "forward", "all_gather")
        return {fqn for bucket in gathers if bucket.backward_use is not None for fqn in bucket.fqns}
    reads = [fqn for _, direction, fqn in captured.computes if direction == "forward" and fqn in promise.entry_of]
    last = promise.entry_of[reads[-1]] if reads else None
    kept = kept_entries(asked, list(dict.fromkeys(promise.entry_of.values())), last)
    return {fqn for fqn, entry in promise.entry_of.items() if entry in kept}
