"""Gradients are clipped by a wrong norm: by that of this rank alone, or with one gradient's norm in place of another's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from pytest_fxbucket.graph.collectives import waits_of
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.mutate.arithmetic import is_norm, other_sums
from pytest_fxbucket.mutate.launches import left_out
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Sums of norms over ranks, and the stacks of norms that go into them."""
    for launch, of_norms in other_sums(seen):
        if of_norms:
            yield Site(launch.name, "is left out: the norm is that of this rank", left_out(launch, waits_of(launch)))
    for stack in seen.graph.nodes:
        if operator_name(stack) != "aten::stack" or not all(map(is_norm, stack.all_input_nodes)):
            continue
        for first, second in pairwise(stack.all_input_nodes):
            change = partial(_twice, stack.name, first.name, second.name)
            yield Site(stack.name, f"has the norm {first.name} for {second.name} too", change)


def _twice(stack: str, first: str, second: str, broken: BrokenGraph) -> None:
    broken[stack].replace_input_with(broken[second], broken[first])
