"""Where a node comes from (``torch.fx.traceback``'s NodeSource), as inductor's provenance tracking reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx


def made_of(node: fx.Node, by: str) -> Any:
    """An item of ``meta["from_node"]``: that the pass ``by`` made a node in place of ``node``."""
    from torch.fx.traceback import NodeSource, NodeSourceAction

    return NodeSource(node, by, [NodeSourceAction.CREATE, NodeSourceAction.REPLACE])
