"""Which reductions feed the updates of which entry, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import REDUCTIONS

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Reading


@dataclass(frozen=True, slots=True)
class Fed:
    """The updates of an entry, or of a module where no entry names its parameters."""

    entry: str
    parameters: tuple[str, ...]
    """FQNs, in the order in which the step returns or writes them."""
    states: int
    """How many tensors of optimizer state are updated with them."""
    reductions: tuple[str, ...]
    """Kind and label of each launch that brings a gradient which they are made of, in order of launch."""


def fed(reading: Reading, entry_of: Mapping[str, str], labels: Mapping[str, str]) -> tuple[Fed, ...]:
    """The updates that ``reading`` found, in order of their first parameter; ``labels`` names buckets by their launch's node.

    Of a gradient that is reduced twice, the second reduction feeds the update.
    """
    order: dict[str, int] = {}
    brings: dict[str, str] = {}
    for bucket in reading.buckets:
        if bucket.kind in REDUCTIONS:
            name = f"{bucket.kind} {labels.get(bucket.node) or 'of ' + ', '.join(filter(None, bucket.fqns))}"
            order.setdefault(name, bucket.launch)
            brings |= dict.fromkeys(filter(None, bucket.fqns), name)
    parameters: dict[str, list[str]] = {}
    names: dict[str, set[str]] = {}
    for update in reading.updates:
        if update.role == "param":
            entry = entry_of.get(update.fqn) or update.fqn.rpartition(".")[0] or update.fqn
            parameters.setdefault(entry, []).append(update.fqn)
            names.setdefault(entry, set()).update(brings[fqn] for fqn in update.gradients | update.norms if fqn in brings)
    states = [update.fqn.rpartition(".")[0] for update in reading.updates if update.role == "state"]
    held = {fqn: entry for entry, fqns in parameters.items() for fqn in fqns}
    counts = dict.fromkeys(parameters, 0)
    for fqn in states:
        if fqn in held:
            counts[held[fqn]] += 1
    return tuple(
        Fed(entry, tuple(fqns), counts[entry], tuple(sorted(names[entry], key=order.__getitem__)))
        for entry, fqns in parameters.items()
    )
