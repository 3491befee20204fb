"""GraphView, the module tree of a traced graph, to be asked and printed as the model itself. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.graph_view.subgraph import SubGraph
    from pytest_fxbucket.graph_view.view import GraphView

__all__ = ["GraphView", "SubGraph"]


def __getattr__(name: str) -> Any:
    if name == "GraphView":
        from pytest_fxbucket.graph_view.view import GraphView

        return GraphView
    if name == "SubGraph":
        from pytest_fxbucket.graph_view.subgraph import SubGraph

        return SubGraph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
