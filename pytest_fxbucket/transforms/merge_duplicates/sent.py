"""A launch as it may be merged with another one that brings the same, or why it may not."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.groups import untwinned
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of, written
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.transforms.merge_duplicates.writes import Writes, named

if TYPE_CHECKING:
    from torch import fx

_FORMS = ("_coalesced", "_out", "_")
"""What the names of operators end in that launch the same in another form."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One launch of a graph. Not to be asked once the graph has changed."""

    launch: fx.Node
    kind: collectives.Kind
    index: int
    tensors: tuple[fx.Node, ...]
    """What it sends; several of a coalesced one."""
    parts: Mapping[int, fx.Node]
    """Of a coalesced launch the ``getitem`` of each part that somebody takes."""
    waits: Mapping[int, tuple[fx.Node, ...]]
    """Waits for each part, and waits for those, in order; a launch of one tensor has part 0."""
    problem: str
    """Why it is left alone, as a clause of which it is the subject or "its"; empty if it may be merged."""

    @property
    def says(self) -> Hashable:
        """Its collective, without what it sends and where to."""
        op = overload(self.launch)
        assert op is not None
        name = op._schema.name
        for form in _FORMS:
            name = name.removesuffix(form)
        others = [a.name for a in op._schema.arguments[1:] if a.name != "out"]
        return name, *((other, _text(collectives.argument(self.launch, other))) for other in others)


def _text(value: object) -> str:
    return untwinned(value) if isinstance(value, str) else repr(value)


def read(launch: fx.Node, writes: Writes) -> Sent:
    """``launch``, a node that launches a collective, with its waits."""
    kind = collectives.launch_kind(launch)
    assert kind is not None
    given = collectives.sent_by(launch)
    several = isinstance(given, (list, tuple))
    tensors = tuple(one for one in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(one, torch.fx.Node))
    parts: dict[int, fx.Node] = {}
    waits: dict[int, list[fx.Node]] = {}
    early = ""
    index = writes.order.index
    for user in launch.users:
        if not several and collectives.is_wait(user):
            waits.setdefault(0, []).append(user)
        elif several and user.target is getitem and isinstance(user.args[1], int) and user.args[1] not in parts:
            parts[user.args[1]] = user
            waits[user.args[1]] = [wait for wait in user.users if collectives.is_wait(wait)]
            early = early or next((f"{n.name} reads it before its wait" for n in user.users if not collectives.is_wait(n)), "")
        else:
            early = early or f"{user.name} reads it before its wait"
    held = {part: tuple(sorted(_again(nodes), key=index.__getitem__)) for part, nodes in waits.items()}
    sent = Sent(launch, kind, index[launch], tensors, parts, held, "")
    problem = _form(sent) or early or _waited(sent) or _written(sent, writes)
    return Sent(launch, kind, index[launch], tensors, parts, held, problem)


def _again(waits: list[fx.Node]) -> list[fx.Node]:
    """``waits`` and the waits for what they give, which it is already."""
    found = list(waits)
    for wait in found:
        found += [user for user in wait.users if collectives.is_wait(user)]
    return found


def _form(sent: Sent) -> str:
    if isinstance(sent.launch.kwargs.get("out"), torch.fx.Node):
        return "it fills a buffer that it is given"
    if written(sent.launch):
        return "it works in place"
    if sent.kind == "other" or effects_of(sent.launch).chained or not sent.tensors:
        return f"{sent.launch.target} is no collective that is merged"
    return ""


def _waited(sent: Sent) -> str:
    return "" if any(sent.waits.values()) and all(sent.waits.values()) else "nobody waits for it, or for a part of it"


def _written(sent: Sent, writes: Writes) -> str:
    order = writes.order
    end = max(order.index[wait] for waits in sent.waits.values() for wait in waits)
    for tensor in sent.tensors:
        if (writer := writes.first(tensor, sent.index, end)) is not None:
            return f"{named(writer)} what it sends before its wait"
    writing = order.writing(sent.launch)
    return f"{named(order.nodes[writing[0]])} its result" if writing else ""
