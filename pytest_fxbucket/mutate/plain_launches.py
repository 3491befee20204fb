"""Launches of one tensor, and the same launch of something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import is_wait, tensors_sent, waits_of
from pytest_fxbucket.graph.ops import operator_name

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.mutate.operator import Broken, Seen

_PLAIN = tuple(f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"))


def plain_launches(seen: Seen) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(launch, what it sends) of every gather and reduction of one tensor that is waited for."""
    for node in seen.graph.nodes:
        if operator_name(node) in _PLAIN and node.users and all(map(is_wait, node.users)):
            yield node, tensors_sent(node)[0]


def sent_otherwise(launch: fx.Node, sent: fx.Node, read: Callable[[fx.Node], fx.Node], broken: Broken) -> None:
    """Let ``launch`` send ``sent``, and all that read its waits what ``read`` makes of the new ones."""
    target = launch.target
    assert callable(target)
    new = broken.before(launch, target, sent, *launch.args[1:], **launch.kwargs)
    for wait in waits_of(launch):
        assert callable(wait.target)
        broken.bypass(wait, read(broken.before(wait, wait.target, new)))
    broken.graph.erase_node(launch)


def leave_out_launch(name: str, broken: Broken) -> None:
    """Let all that wait for the launch ``name`` read what it sends."""
    launch = broken[name]
    (sent,) = tensors_sent(launch)
    for wait in waits_of(launch):
        broken.bypass(wait, sent)
    broken.graph.erase_node(launch)
