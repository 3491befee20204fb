"""What keeps a node behind others, for compilers that know of no order, is taken out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.compat.fx import after
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every such node that names others."""
    for node in seen.graph.find_nodes(op="call_function", target=after):
        if node.args[1]:
            yield Site(node.name, "is taken out", partial(_take_out, node.name))


def _take_out(name: str, broken: BrokenGraph) -> None:
    node = broken[name]
    # ``after`` gives a list of one tensor, so what reads it are getitems.
    for item in list(node.users):
        broken.bypass(item, node.all_input_nodes[0])
    broken.graph.erase_node(node)
