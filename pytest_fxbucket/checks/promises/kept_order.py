"""Does the graph itself say its order, where ``[overlap] insert_overlap_deps`` asks for that?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.fx import after
from pytest_fxbucket.graph.collectives import is_wait, launch_kind, tensors_sent

if TYPE_CHECKING:
    from torch import fx

_PROMISE = "as insert_overlap_deps promises"


def order_problems(graph: fx.Graph, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A sentence for each of ``pairs`` (earlier, later) that a compiler may put in another order, since no edge keeps it.

    So for each wait among the later ones whose readers do not hold what is sent: its memory may be given away too early.
    """
    nodes = {node.name: node for node in graph.nodes}
    place = {node: at for at, node in enumerate(graph.nodes)}
    for pair in pairs:
        if gone := [name for name in pair if name not in nodes]:
            yield f"{gone[0]} is not in the graph, which was to keep {pair[0]} before {pair[1]}"
        elif not _needs(nodes[pair[1]], nodes[pair[0]], place):
            yield f"nothing keeps {pair[0]} before {pair[1]}, {_PROMISE}"
    launches = _launches(graph)
    for later in dict.fromkeys(later for _, later in pairs):
        wait = nodes.get(later)
        if wait in launches and is_wait(wait):
            yield from _not_held(wait, launches[wait])


def _needs(later: fx.Node, earlier: fx.Node, place: Mapping[fx.Node, int]) -> bool:
    """Whether ``later`` is made of ``earlier``, through what stands between them."""
    seen, todo = {later}, [later]
    while todo:
        node = todo.pop()
        if node is earlier:
            return True
        new = {one for one in node.all_input_nodes if place[one] >= place[earlier]} - seen
        seen |= new
        todo += new
    return False


def _launches(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Of each wait its launch, behind views and what keeps the order."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = next(iter(node.all_input_nodes), None)
        if launch_kind(node) is not None:
            found[node] = node
        elif source in found and not is_wait(source):
            found[node] = found[source]
    return found


def _not_held(wait: fx.Node, launch: fx.Node) -> Iterator[str]:
    sent = set(tensors_sent(launch))
    for reader in wait.users:
        if reader.target is not after or not sent <= set(reader.all_input_nodes):
            yield f"{reader.name} reads {wait.name}, and does not hold what {launch.name} sends, {_PROMISE}"
