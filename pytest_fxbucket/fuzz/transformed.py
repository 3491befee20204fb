"""Transformations of a step, on a drawn program before our pass sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.fuzz.program import copied
from pytest_fxbucket.fuzz.roles import step_of
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.transforms.registry import BUILT_IN

if TYPE_CHECKING:
    from torch import fx

SAME_BITS = ("merge_duplicates",)
"""Those that a program without roles can have, and that leave all bits as they are."""
ROUNDS = "add_before_reducing"
"""Leaves them only where sums are exact."""


def fit(names: Sequence[str], graph: fx.Graph, world: int) -> bool:
    """Whether all bits can be held to what they were."""
    return ROUNDS not in names or _sums_exactly(graph, world)


def _sums_exactly(graph: fx.Graph, world: int) -> bool:
    """Whether reductions give the same in any order: of integers, and of halves and quarters of them, in more than 16 bits."""
    for node in graph.nodes:
        said = collectives.read_launch(node)
        if said is None or said.kind not in collectives.REDUCTIONS:
            continue
        values = collectives.tensors(node.meta["val"])
        if any(value.dtype.itemsize < 4 for value in values) or (said.op == "avg" and world & (world - 1)):
            return False
    return True


def before_the_pass(graph_module: fx.GraphModule, names: Iterable[str]) -> fx.GraphModule:
    """What an expression after the pass is told by: a copy of ``graph_module``, behind those of ``names`` that round."""
    return transformed(copied(graph_module), [name for name in names if name == ROUNDS])


def transformed(graph_module: fx.GraphModule, names: Iterable[str]) -> fx.GraphModule:
    """``graph_module``, which is changed, behind the transformations called ``names``."""
    step = step_of(graph_module)
    for name in names:
        step = import_callable(BUILT_IN[name], name)(step, {})
    return step.graphs["joint"]
