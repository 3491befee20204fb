"""GraphView, the module tree of a traced graph, to be asked and printed as the model itself. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.first_use import on_first_use

if TYPE_CHECKING:
    from pytest_fxbucket.graph_view.subgraph import SubGraph
    from pytest_fxbucket.graph_view.view import GraphView

__all__ = ["GraphView", "SubGraph"]
__getattr__ = on_first_use(__name__, {"graph_view.subgraph": ["SubGraph"], "graph_view.view": ["GraphView"]})
