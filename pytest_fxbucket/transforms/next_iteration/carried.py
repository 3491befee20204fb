"""What goes from one call to the next: gradients not yet reduced, learning rates, and whatever else a block is given."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.roles import Value

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.transforms.next_iteration.block import Block


@dataclass(frozen=True, slots=True)
class Carried:
    """One value that a call hands to the next."""

    node: fx.Node
    """Of the joint graph."""
    value: Value
    copies: bool
    """Whether it lives where somebody may write before the next call: it must be a copy."""


def carried_of(block: Block) -> list[Carried]:
    """What the block must be handed, in order of its first reader.

    A gradient has the FQN of its parameter, a learning rate its own name; other values count from 1.
    """
    gradients = {
        maker: fqn for one in block.reductions if one.level == 0 for fqn, maker in zip(one.fqns, one.makers, strict=True)
    }
    gradients |= {node: value.fqn for node, value in block.results if value.role == "grad" and node not in gradients}
    lasting = {
        storage
        for node in block.order.nodes
        if node.op in ("placeholder", "get_attr")
        for storage in block.order.storages(node)
    }
    found: list[Carried] = []
    names: Counter[str] = Counter()
    for node in block.fed():
        given = block.given.get(node)
        if node.op == "get_attr" or (given is not None and block.is_own(given)):
            continue
        name = _name(given, gradients.get(node), names)
        names[name] += 1
        if names[name] > 1:
            name = f"{name} #{names[name]}"
        tensor: torch.Tensor = node.meta["val"]
        value = Value("carried", name, tuple(tensor.shape), tensor.dtype)
        found.append(Carried(node, value, not lasting.isdisjoint(block.order.storages(node))))
    return found


def _name(given: Value | None, gradient: str | None, names: Counter[str]) -> str:
    if given is not None:
        return given.fqn if given.role == "hyper" else f"{given.role} {given.fqn}"
    if gradient is not None:
        return gradient
    return f"value {1 + sum(name.startswith('value ') for name in names)}"
