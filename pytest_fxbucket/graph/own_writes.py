"""Whether some nodes of a graph can run by themselves for all that is written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.graph.effects import effects_of, given

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order


@dataclass(slots=True)
class _Storage:
    """How some nodes of a graph meet one storage."""

    touches: list[int] = field(default_factory=list)
    """Which of them read or write it, or make it, ascending."""
    made: list[fx.Node] = field(default_factory=list)
    """Those whose new result it is."""
    fed: list[fx.Node] = field(default_factory=list)
    """Their inputs that live in it."""


def why_not_alone(order: Order, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> str:
    """Why ``nodes``, in one go on ``inputs``, would compute something else than where they stand; empty if they would not."""
    members = {order.index[node] for node in nodes}
    storages = _storages(order, nodes, inputs)
    return next((why for number, storage in storages.items() if (why := _why(order, members, number, storage))), "")


def _storages(order: Order, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> dict[int, _Storage]:
    found: dict[int, _Storage] = {}
    for node in nodes:
        own, read = order.storages(node), {s for n in given(node) for s in order.storages(n)}
        for number in own | read:
            storage = found.setdefault(number, _Storage())
            storage.touches.append(order.index[node])
            if number not in read:
                storage.made.append(node)
    for node in inputs:
        for number in order.storages(node):
            found.setdefault(number, _Storage()).fed.append(node)
    return found


def _why(order: Order, members: set[int], number: int, storage: _Storage) -> str:
    writers = [i for i in order.writers(number) if _may_write(order.nodes[i])]
    touches = storage.touches
    foreign = next((i for i in writers if i not in members and touches and touches[0] < i < touches[-1]), None)
    if foreign is not None:
        first, last = order.nodes[touches[0]].name, order.nodes[touches[-1]].name
        return f"{_writes(order.nodes[foreign])} what {first} and {last} share, and stands between them"
    own = [i for i in writers if i in members]
    if not own:
        return ""
    begin, writer = own[0] if storage.fed else touches[0], order.nodes[own[-1]]
    reader = next((i for i in order.readers(number) if i not in members and begin < i < own[-1]), None)
    if reader is not None:
        return f"{order.nodes[reader].name} reads what {_writes(writer)} later"
    ways = [*storage.fed, *storage.made]
    if storage.fed and len(ways) > 1:
        return f"its inputs and nodes share memory ({ways[0].name} and {ways[1].name}), and {_writes(writer)} there"
    return ""


def _writes(node: fx.Node) -> str:
    return f"{node.name} {'may write' if effects_of(node).everything else 'writes in place'}"


def _may_write(node: fx.Node) -> bool:
    """Not so if it is one of torch's functions, methods or modules, and is not called what those are that write in place."""
    target: Any = node.target
    if not effects_of(node).everything or isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return True
    if node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
        return True
    if node.op == "call_module" and node.graph.owning_module is not None:
        module = node.graph.owning_module.get_submodule(target)
        return not type(module).__module__.startswith("torch.nn.") or bool(getattr(module, "inplace", False))
    name = target if node.op == "call_method" else getattr(target, "__name__", "_")
    if name.endswith("_") and not (name.startswith("__") and name != "__setitem__"):
        return True
    return node.op != "call_method" and not _is_of_torch(target)


def _is_of_torch(target: Any) -> bool:
    module = getattr(target, "__module__", None) or getattr(getattr(target, "__self__", None), "__module__", None) or ""
    return module.partition(".")[0] == "torch"
