"""What storages hold that are written in place: which values share one, and the chain of writes that it went through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.storage import storage_key
from pytest_fxbucket.graph.effects import effects_of, shared, written
from pytest_fxbucket.same.attributes import attribute

if TYPE_CHECKING:
    from torch import fx

Home = tuple[Any, ...]


class States:
    """Storages of one graph, by what operators say and never by fake values, and the state of each that was written.

    ``homes`` are storages of inputs that share one, by the input's place.
    """

    def __init__(self, nodes: Sequence[fx.Node], root: torch.nn.Module, homes: Mapping[int, Any]) -> None:
        self.state: dict[Any, int] = {}
        """Of each storage that was written the expression of its last write, in which all earlier ones are."""
        self._homes: dict[fx.Node, Home] = {}
        self.changing = any(_may_write(node) for node in nodes)
        """Whether anything is written at all."""
        if self.changing:
            self._find(nodes, root, homes)

    def _find(self, nodes: Iterable[fx.Node], root: torch.nn.Module, homes: Mapping[int, Any]) -> None:
        place = 0
        for index, node in enumerate(nodes):
            if node.op == "placeholder":
                self._homes[node] = (homes.get(place, index),)
                place += 1
            elif node.op == "get_attr":
                self._homes[node] = (_of_attribute(root, str(node.target)),)
            else:
                self._homes[node] = self._of(index, node)

    def _of(self, index: int, node: fx.Node) -> Home:
        """A view's are those of what it shows; what may be a copy has one of its own as well."""
        effects = effects_of(node)
        if not (effects.shares or effects.shares_all or effects.everything):
            return (index,)
        found = dict.fromkeys(home for source in shared(node, effects) for home in self._homes[source])
        return (*found,) if effects.shares and found else (*found, index)

    def of(self, node: fx.Node) -> Home:
        """Storages that ``node``'s result may live in."""
        return self._homes[node]

    def now(self, node: fx.Node) -> tuple[int, ...]:
        """States of ``node``'s storages; none if none of them was written yet."""
        if not self.state:
            return ()
        homes = self._homes[node]
        if not any(home in self.state for home in homes):
            return ()
        return tuple(self.state.get(home, 0) for home in homes)


def _may_write(node: fx.Node) -> bool:
    effects = effects_of(node)
    return bool(effects.writes or effects.everything) and bool(written(node))


def _of_attribute(root: torch.nn.Module, name: str) -> object:
    """Two attributes that hold one tensor are one storage."""
    held = attribute(root, name)
    return ("storage", storage_key(held)) if isinstance(held, torch.Tensor) else name
