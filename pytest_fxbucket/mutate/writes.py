"""Writes in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import communicates
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.ops import overload, returns_written
from pytest_fxbucket.mutate.values import tensor

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.mutate.operator import Seen


def writes(seen: Seen) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(writer, what it writes) of each operator that writes one tensor and gives that or nothing."""
    for node in seen.graph.nodes:
        if overload(node) is None or communicates(node):
            continue
        targets = written_arguments(node)
        if len(targets) == 1 and tensor(targets[0]) is not None and (returns_written(node) or not node.users):
            yield node, targets[0]
