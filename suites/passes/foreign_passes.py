"""Passes of a user, each wrong in its own way; imported by name."""

from __future__ import annotations

from typing import Any

from torch import fx


def same(gm: fx.GraphModule, plans: Any) -> fx.GraphModule:
    return gm


def raises(gm: fx.GraphModule, plans: Any) -> fx.GraphModule:
    raise KeyError("no such\nmodule")


def returns_none(gm: fx.GraphModule, plans: Any) -> None:
    return None


def takes_one_argument(gm: fx.GraphModule) -> fx.GraphModule:
    return gm


def clears_the_graph(gm: fx.GraphModule, plans: Any) -> fx.GraphModule:
    """Changes what it was given before it fails."""
    gm.graph.output_node().args = ([],)
    raise ValueError("half done")
