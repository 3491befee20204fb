"""Transformations of a step, on a drawn program before our pass sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.same.two_graphs import ends
from pytest_fxbucket.step.roles import StepGraph
from pytest_fxbucket.transforms.registry import BUILT_IN

if TYPE_CHECKING:
    from torch import fx

SAME_BITS = ("merge_duplicates",)
"""Those that a program without roles can have, and that leave all bits as they are."""


def transformed(graph_module: fx.GraphModule, names: Iterable[str]) -> fx.GraphModule:
    """``graph_module``, which is changed, behind the transformations called ``names``."""
    inputs, outputs = ends(graph_module.graph)
    step = StepGraph({"joint": graph_module}, {"joint": tuple(inputs)}, {"joint": tuple(outputs)}, (), (), (), 0)
    for name in names:
        step = import_callable(BUILT_IN[name], name)(step, {})
    return step.graphs["joint"]
