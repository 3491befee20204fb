"""What mutation operators ask of the launches and waits of a graph, and how they drop, replace, swap and repack them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.graph.collectives import REDUCTIONS, argument, is_wait, launch_kind, tensors_sent, waits_of
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.mutate.moving import NodeMove, brought_by, carries, lifted, passed_on, sunk
from pytest_fxbucket.passes.keep_order import launch_of
from pytest_fxbucket.passes.new_nodes import set_argument

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Bucket
    from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph

aten = torch.ops.aten
_PLAIN = tuple(f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"))


@dataclass(frozen=True, slots=True)
class LaunchInFlight:
    """A launch and its waits."""

    launch: fx.Node
    waits: tuple[fx.Node, ...]
    """In graph order."""
    bucket: Bucket | None
    """The bucket that the analysis of the graph read from this launch; None if it read none."""

    @property
    def group(self) -> str:
        """Name of its process group."""
        return str(argument(self.launch, "group_name"))

    @property
    def sent(self) -> fx.Node | None:
        """The tensor that it sends; None if it sends several."""
        sent = tensors_sent(self.launch)
        return sent[0] if len(sent) == 1 and isinstance(self.launch.meta.get("val"), torch.Tensor) else None

    @property
    def arrived(self) -> list[fx.Node]:
        """The waits, and every node behind them that only carries the result on, as :func:`carries` says."""
        return [node for wait in self.waits for node in passed_on(wait)]

    @property
    def sources(self) -> list[tuple[fx.Node, fx.Node]]:
        """(reader, source) where the pack begins: ``reader`` is a node of the pack, ``source`` a node outside that it reads."""
        own = brought_by(self.launch)
        return [(node, source) for node in own for source in node.all_input_nodes if source not in own]

    @property
    def planned(self) -> bool:
        """Whether it carries a parameter, or the gradient of one."""
        return self.bucket is not None and any(self.bucket.fqns)


def flights(seen: SeenGraph) -> list[LaunchInFlight]:
    """All launches, in graph order."""
    # Read off the waits, since a launch of several tensors has a wait for each, and ``after`` nodes may lie in between.
    waits: dict[fx.Node, list[fx.Node]] = {}
    for node in seen.graph.nodes:
        if is_wait(node):
            waits.setdefault(launch_of(node), []).append(node)
    buckets = {bucket.node: bucket for bucket in seen.reading.buckets}
    launches = (node for node in seen.graph.nodes if launch_kind(node) is not None)
    return [LaunchInFlight(node, tuple(waits.get(node, ())), buckets.get(node.name)) for node in launches]


# A local replacement for a collective, of the shape that arrives: the sent tensor itself, one copy of it for each rank as of a
# gather, or its first rows as of a reduce-scatter on the first rank.


def can_drop(flight: LaunchInFlight) -> bool:
    """Whether a local replacement of the shape and dtype that arrive can be made of the sent tensor."""
    return bool(flight.waits) and _stand_in(flight.launch, flight.sent) is not None


def left_out(launch: fx.Node, waits: Iterable[fx.Node]) -> Callable[[BrokenGraph], None]:
    """A change that takes out ``launch``, which :func:`can_drop`, and its ``waits``; readers read the local replacement."""
    return partial(_drop, launch.name, tuple(wait.name for wait in waits))


def _drop(launch: str, waits: tuple[str, ...], broken: BrokenGraph) -> None:
    node = broken[launch]
    make = _stand_in(node, tensors_sent(node)[0])
    assert make is not None
    instead = make(broken)
    # The waits go first: fx erases a node only when nobody reads it.
    for wait in waits:
        broken.bypass(broken[wait], broken[wait].all_input_nodes[0])
    broken.bypass(node, instead)


def _stand_in(launch: fx.Node, sent: fx.Node | None) -> Callable[[BrokenGraph], fx.Node] | None:
    if sent is None:
        return None
    large, small = launch.meta["val"], sent.meta["val"]
    # Where rows can be neither repeated nor cut, and below where their number is 0, only the sent tensor itself can serve.
    if large.dtype != small.dtype or large.dim() == 0 or large.shape[1:] != small.shape[1:] or not small.shape[0]:
        return (lambda broken: sent) if large.shape == small.shape and large.dtype == small.dtype else None
    times, rest = divmod(large.shape[0], small.shape[0])
    if large.shape == small.shape:
        return lambda broken: sent
    if times > 1 and not rest:
        return lambda broken: broken.before(launch, aten.cat.default, [sent] * times)
    # ``times`` is 0 where fewer rows arrive than are sent.
    return (lambda broken: broken.before(launch, aten.slice.Tensor, sent, 0, 0, large.shape[0])) if not times else None


def same_shape_and_dtype(one: fx.Node, other: fx.Node) -> bool:
    """Whether both give tensors of one shape and dtype."""
    mine, its = one.meta.get("val"), other.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(its, torch.Tensor):
        return False
    return mine.shape == its.shape and mine.dtype == its.dtype


def neighbours(found: list[LaunchInFlight]) -> Iterator[tuple[LaunchInFlight, LaunchInFlight]]:
    """Pairs of launches that follow each other on one process group."""
    last: dict[str, LaunchInFlight] = {}
    for flight in found:
        if flight.group in last:
            yield last[flight.group], flight
        last[flight.group] = flight


def gathers(seen: SeenGraph) -> list[LaunchInFlight]:
    """Launches that gather parameters."""
    return [one for one in flights(seen) if one.bucket is not None and one.bucket.kind == "all_gather" and one.planned]


def reductions(seen: SeenGraph) -> list[LaunchInFlight]:
    """Launches that reduce gradients of parameters."""
    return [one for one in flights(seen) if one.bucket is not None and one.bucket.kind in REDUCTIONS and one.planned]


def trades(seen: SeenGraph) -> Iterator[tuple[str, str, NodeMove]]:
    """Each pair of :func:`neighbours` that can trade places: both names, and the move that puts the second one first."""
    for first, second in neighbours(flights(seen)):
        # What the second one needs may be made between them: then the first is moved down instead.
        move = lifted(seen, second.launch, first.launch) or sunk(seen, first.launch, second.launch.next)
        if move is not None:
            yield first.launch.name, second.launch.name, move


def regroup(name: str, group: str, broken: BrokenGraph) -> None:
    """Let the launch ``name`` be on process group ``group``."""
    set_argument(broken[name], "group_name", group)


def plain_launches(seen: SeenGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(launch, what it sends) of every gather and reduction of one tensor that is waited for."""
    for node in seen.graph.nodes:
        if operator_name(node) in _PLAIN and node.users and all(map(is_wait, node.users)):
            yield node, tensors_sent(node)[0]


def sent_otherwise(launch: fx.Node, sent: fx.Node, read: Callable[[fx.Node], fx.Node], broken: BrokenGraph) -> None:
    """Replace ``launch`` by one that sends ``sent``; readers of an old wait read what ``read`` makes of the new wait."""
    # Launch and waits are made anew, since their fake values are of another dtype then.
    target = launch.target
    assert callable(target)
    new = broken.before(launch, target, sent, *launch.args[1:], **launch.kwargs)
    for wait in waits_of(launch):
        assert callable(wait.target)
        broken.bypass(wait, read(broken.before(wait, wait.target, new)))
    broken.graph.erase_node(launch)


# The cat that packs the members of a launch, and the split that cuts the arrived tensor into members again.


def pack_of(launch: fx.Node) -> fx.Node | None:
    """The ``cat`` of several tensors that ``launch`` sends, also through casts and views; None if it sends none."""
    for node in tensors_sent(launch):
        while carries(node):
            if operator_name(node) == "aten::cat":
                return node if len(node.all_input_nodes) > 1 else None
            if len(node.all_input_nodes) != 1:
                return None
            node = node.all_input_nodes[0]
    return None


def split_of(flight: LaunchInFlight) -> fx.Node | None:
    """The ``split_with_sizes`` that cuts the arrived tensor into several pieces of known sizes; None without one."""
    for node in flight.arrived:
        if operator_name(node) == "aten::split_with_sizes" and len(pieces_of(node)) > 1 and sizes_of(node):
            return node
    return None


def members_of(pack: fx.Node) -> list[fx.Node]:
    """The tensors that ``pack`` concatenates, in order."""
    members: Any = pack.args[0]
    return list(members)


def pieces_of(split: fx.Node) -> dict[int, fx.Node]:
    """The ``getitem`` nodes of ``split`` by their index."""
    return {int(str(user.args[1])): user for user in split.users if user.target is getitem}


def sizes_of(split: fx.Node) -> list[int]:
    """Elements of each piece of ``split`` along its dimension; empty if any is symbolic."""
    sizes: Any = split.args[1]
    return list(sizes) if all(isinstance(size, int) for size in sizes) else []


def dim_of(split: fx.Node) -> int:
    """The dimension that ``split`` cuts."""
    return int(str(split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)))
