"""What a launch carries, told from the graph alone where nobody said which inputs are parameters.

An all-gather carries a parameter if what it sends comes from a graph input through nothing but moved, padded and cast data
and other gathers. A reduction reduces a gradient unless its result reaches a product with a weight: then it is an activation's
(tensor and sequence parallelism), which a bucket of parameters must leave alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.modules import direction_of
from pytest_fxbucket.graph.movement import moves_or_pads
from pytest_fxbucket.graph.ops import by_operator, returned
from pytest_fxbucket.graph.walks import reached

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.roles import Direction

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "convolution", "_scaled_mm", "embedding", "_grouped_mm")
_is_product = by_operator(lambda op: op._schema.name in {f"aten::{name}" for name in _PRODUCTS}, False)


class LaunchContents(NamedTuple):
    """What one launch carries, and for which entry."""

    fqns: tuple[str, ...]
    """Parameters that it carries, or whose gradients it reduces; where nobody says which those are, names of the graph's inputs
    that it sends, or of the outputs that it reduces for."""
    place: int
    """Index of the first of them: in the order of registration, or among the graph's inputs or outputs."""
    direction: Direction
    reason: str = ""
    """Why it belongs to no entry; means nothing if ``entry`` is given."""
    level: int = 0
    """Launches before it on the way of its data: :attr:`MergeTarget.level <pytest_fxbucket.passes.targets.MergeTarget.level>`
    is made from it."""
    again: bool = False
    """Of a gather: whether what it sends was gathered over its own group before."""
    entry: str | None = None
    """None: no entry names it, for ``reason``."""
    round: int = 0


def carried(graph: fx.Graph) -> dict[fx.Node, LaunchContents]:
    """What each launch of ``graph`` carries, in graph order."""
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    values = returned(graph.output_node())
    # Reversed, so that a node that is returned several times has the place where it is returned first.
    outputs = {node: i for i, node in reversed(list(enumerate(values))) if isinstance(node, torch.fx.Node)}
    products = _Products()
    found: dict[fx.Node, LaunchContents] = {}
    levels = launches_before(graph)
    for index, node in enumerate(graph.nodes):
        kind = collectives.launch_kind(node)
        if kind == "all_gather":
            found[node] = _gather(node, inputs)._replace(level=levels[node], again=_gathered_before(node))
        elif kind is not None:
            found[node] = _reduction(node, outputs, products, index)._replace(level=levels[node])
    return found


def _gather(node: fx.Node, inputs: dict[fx.Node, int]) -> LaunchContents:
    direction = direction_of(node)
    sources: list[fx.Node] = []
    for source in _sources(node):
        if source not in inputs:
            return LaunchContents((), 0, direction, f"it gathers what {source.name} computes, no parameter")
        sources.append(source)
    sources.sort(key=inputs.__getitem__)
    return LaunchContents(tuple(s.name for s in sources), inputs[sources[0]] if sources else 0, direction)


def launches_before(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many launches stand one behind the other on the way to each node that passes data on, the most of any way."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if _passes_on(node):
            sources = [source for source in _data_inputs(node) if source in found]
            found[node] = max((found[one] + (collectives.launch_kind(one) is not None) for one in sources), default=0)
    return found


def _gathered_before(gather: fx.Node) -> bool:
    """Whether ``gather`` sends what another gather over its group brought, with data but moved and cast between."""
    group = collectives.argument(gather, "group_name")
    before = reached([gather], lambda node: filter(_passes_on, _data_inputs(node)))[1:]
    return any(collectives.is_all_gather(one) and collectives.argument(one, "group_name") == group for one in before)


def _sources(node: fx.Node) -> list[fx.Node]:
    """Where the data that ``node`` sends comes from, back through moves, casts and other gathers; buffers are no source."""

    def passes_on(one: fx.Node) -> bool:
        return one is node or moves_or_pads(one) or collectives.is_wait(one) or collectives.is_all_gather(one)

    met = reached([node], lambda one: _data_inputs(one) if passes_on(one) else ())
    return [one for one in met if not passes_on(one)]


def _passes_on(node: fx.Node) -> bool:
    return collectives.communicates(node) or moves_or_pads(node)


def _data_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Inputs of ``node`` but for the buffer that it writes and symbolic sizes."""
    buffer = node.kwargs.get("out")
    for source in node.all_input_nodes:
        if source is not buffer and not isinstance(source.meta.get("val"), (torch.SymInt, int)):
            yield source


def _reduction(node: fx.Node, outputs: dict[fx.Node, int], products: _Products, index: int) -> LaunchContents:
    direction = direction_of(node)
    if products.reached_from(node):
        return LaunchContents((), 0, direction, "its result goes into a product with a weight: it carries an activation")

    def onward(one: fx.Node) -> Iterable[fx.Node]:
        further = collectives.launch_kind(one) in collectives.REDUCTIONS  # over another dimension of the mesh
        return one.users if further or collectives.is_wait(one) or moves_or_pads(one) else ()

    # A gradient that the graph does not return, as it goes to the optimizer, has its place behind all that it returns.
    place = next((outputs[one] for one in reached(node.users, onward) if one in outputs), None)
    return (
        LaunchContents((), len(outputs) + index, direction)
        if place is None
        else LaunchContents((f"output {place}",), place, direction)
    )


class _Products:
    """Finds products with a weight: a graph input or what a gather brings, moved and cast too. Few reductions lead to any."""

    def __init__(self) -> None:
        self._clear: set[fx.Node] = set()
        """Nodes whose values reach no such product: a later search stops at them."""

    def reached_from(self, launch: fx.Node) -> bool:
        """Whether what ``launch`` brings reaches such a product, through any path."""
        found: list[fx.Node] = []

        def onward(node: fx.Node) -> Iterable[fx.Node]:
            if not found and _is_product(node) and any(map(_is_weight, node.all_input_nodes)):
                found.append(node)
            return () if found else (user for user in node.users if user not in self._clear)

        met = reached(launch.users, onward)
        # A search that found a product ended there, so what it met may lead to one.
        if not found:
            self._clear.update(met)
        return bool(found)


def _is_weight(node: fx.Node) -> bool:
    def onward(one: fx.Node) -> Iterable[fx.Node]:
        return one.all_input_nodes if collectives.is_wait(one) or moves_or_pads(one) else ()

    return any(one.op == "placeholder" or collectives.is_all_gather(one) for one in reached([node], onward))
