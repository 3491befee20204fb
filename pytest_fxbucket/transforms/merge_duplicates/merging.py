"""Takes a launch out of a graph whose result another one brings already, and with it what nothing needs any more."""

from __future__ import annotations

from operator import getitem
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.fake_tensors import fresh_like
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.passes.fake import fake_value, seen
from pytest_fxbucket.passes.provenance import LAUNCHES
from pytest_fxbucket.transforms.merge_duplicates.forms import form_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.transforms.merge_duplicates.sent import Sent

_clone, _view = torch.ops.aten.clone.default, torch.ops.aten.view.default


def merge(graph: fx.Graph, kept: fx.Node, again: Sent, copied: bool) -> None:
    """Let the readers of ``again`` read what the launch ``kept`` before it brings, or with ``copied`` a copy of that.

    They get it in the shape in which they had it, seen so if need be: both bring the same elements, and contiguous ones.
    ``kept`` stays where it is, and its wait too unless somebody reads before that. ``again`` goes, and what it alone needed.
    """
    for part, waits in again.waits.items():
        taken = again.parts.get(part)
        own = _waits_for(kept, None if taken is None else part)
        if not own and taken is not None:  # nobody had taken this part of the first one yet
            taken.replace_input_with(again.launch, kept)
            continue
        wait = min(own)
        if waits[0] < wait:
            _move_up(wait, waits[0])
        for other in reversed(waits):
            with graph.inserting_before(other):
                other.replace_all_uses_with(_result(graph, wait, other, copied))
            graph.erase_node(other)
        if taken is not None:
            graph.erase_node(taken)
    brings_too(kept, again.launch)
    erase(graph, again.launch)


def brings_too(kept: fx.Node, gone: fx.Node) -> None:
    """Note at the launch ``kept`` that it stands for ``gone``, too, which is still there; in the graph's order."""
    first, second = sorted((kept, gone))
    kept.meta[LAUNCHES] = tuple(name for node in (first, second) for name in node.meta.get(LAUNCHES, (node.name,)))


def erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase ``node``, which nobody reads, and what it alone needed, but for what does anything besides giving a result."""
    queue = [node]
    for gone in queue:
        sources = gone.all_input_nodes
        graph.erase_node(gone)
        queue.extend(source for source in sources if not source.users and _is_idle(source))


def _is_idle(node: fx.Node) -> bool:
    does = effects_of(node)
    acts = does.writes or does.everything or does.random or does.chained or does.barrier or does.flight
    return node.op == "get_attr" or (node.op == "call_function" and not acts)


def _waits_for(launch: fx.Node, part: int | None) -> list[fx.Node]:
    """Waits for ``launch``, or for the ``part`` of a coalesced one."""
    holders = [launch] if part is None else [n for n in launch.users if n.target is getitem and n.args[1] == part]
    return [user for holder in holders for user in holder.users if collectives.is_wait(user)]


def _move_up(wait: fx.Node, place: fx.Node) -> None:
    """Let ``wait`` stand right before ``place``, with the part of a coalesced launch that it waits for."""
    (source,) = wait.all_input_nodes
    if place < source:
        place.prepend(source)
    place.prepend(wait)


def _result(graph: fx.Graph, wait: fx.Node, other: fx.Node, copied: bool) -> fx.Node:
    """What the readers of the wait ``other`` are to read: what ``wait`` gives, or a copy of it, in the shape of ``other``."""
    is_same = form_of(wait) == form_of(other)
    result = wait
    if copied and other.users:
        result = graph.call_function(_clone, (wait,))
        result.meta = {**other.meta, "val": other.meta.get("val") if is_same else fresh_like(fake_value(wait))}
    if not is_same:
        value = seen(fake_value(result), other.meta["val"].shape)
        result = graph.call_function(_view, (result, list(value.shape)))
        result.meta = {**other.meta, "val": value}
    return result
