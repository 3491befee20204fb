"""What a graph does with its parameters: every launch with its members in byte order, who reads them, and when.

Derived from the GraphModule alone (:mod:`pytest_fxbucket.graph.follow`) and the roles of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.graph import collectives, contents
from pytest_fxbucket.graph.contents import PRECISION, RANK, SOURCE
from pytest_fxbucket.graph.follow import Followed, Sent, Use, follow
from pytest_fxbucket.graph.gradients import Gradients, returned

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.capture.roles import Value

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter (or its gradient) in a launch."""

    fqn: str
    """Empty if what is sent is no parameter and no parameter's gradient."""
    offset: int
    """Elements before it in a rank's part of the launch."""
    numel: int
    """Elements of it in a rank's part of the launch."""
    precision: int
    """Fewest bits of mantissa it was squeezed through on its way to where it is read."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One launch as the graph has it. Positions count the graph's nodes."""

    kind: collectives.Kind
    op: str
    group: str
    dtype: torch.dtype | None
    numel: int
    """Elements of the larger side: the gathered result, or the input that is reduced."""
    members: tuple[Member, ...]
    """In byte order."""
    direction: Direction
    launch: int
    wait: int | None
    """First wait for it; None if nobody waits."""
    first_use: int | None
    """First compute that reads a member after the wait; for a reduction the output counts too."""
    backward_use: int | None
    """First compute of the backward that reads a member."""
    node: str
    """Name of the launching node, for messages only."""

    @property
    def bytes(self) -> int:
        """Size of the larger side in bytes."""
        return self.numel * self.dtype.itemsize if self.dtype is not None else 0

    @property
    def fqns(self) -> tuple[str, ...]:
        """Members in byte order."""
        return tuple(member.fqn for member in self.members)


@dataclass(frozen=True, slots=True)
class Reading:
    """A whole graph, read."""

    buckets: tuple[Bucket, ...]
    """Every launch, in order."""
    computes: tuple[tuple[int, Direction, str], ...]
    """(position, direction, FQN): compute that reads a gathered parameter, or makes a gradient that is reduced."""
    problems: tuple[str, ...]
    """What could not be followed, or is jumbled; one sentence each."""
    last: int
    """Position of the output."""


def read_graph(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> Reading:
    """Read a joint graph (or one of its phases) whose inputs and outputs have the given roles, in graph order."""
    return _Reader(graph, inputs, outputs).reading()


class _Reader:
    def __init__(self, graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.output = graph.output_node()
        self.found: Followed = follow(graph)
        self.forward = _forward_nodes(graph, outputs)
        self.forward_positions = {self.position[node] for node in self.forward}
        placeholders = [node for node in self.position if node.op == "placeholder"]
        self.role = {node: value.role for node, value in zip(placeholders, inputs, strict=True)}
        self.parameter = {n: v.fqn for n, v in zip(placeholders, inputs, strict=True) if v.role == "param"}
        self.problems = list(self.found.problems)
        self.computes: set[tuple[int, Direction, str]] = set()
        self.precision: dict[tuple[fx.Node, int], int] = {}
        self.uses: dict[tuple[fx.Node, int], list[int]] = {}
        gradients = Gradients(self.found, self.output, outputs, self.role)
        self.names = gradients.names
        self.problems += gradients.problems
        for use in self.found.uses:
            self._note(use)

    def reading(self) -> Reading:
        buckets = tuple(self._bucket(node, sent) for node, sent in self.found.sent.items())
        return Reading(buckets, tuple(sorted(self.computes)), tuple(self.problems), self.position[self.output])

    def _direction(self, node: fx.Node) -> Direction:
        return "forward" if node in self.forward else "backward"

    def _note(self, use: Use) -> None:
        """Sort one read value: whole parameter, piece of one, reduced gradient, or jumble."""
        runs = use.content
        if not bool((runs[:, RANK] >= 0).any()):
            self._note_reduced(use)
            return
        number = int(runs[0, SOURCE])
        source = self.found.sources[number]
        fqn = self.parameter.get(source.node, "") if source is not None else ""
        if source is None or not contents.ascends(runs, source.numel):
            names = [self._source_name(int(n)) for n in dict.fromkeys(runs[:, SOURCE].tolist())]
            self.problems.append(
                f"{use.reader.target} ({use.reader.name}) reads gathered bytes that are no parameter in its order: "
                + ", ".join(names[:4])
            )
            return
        where = self.position[use.reader]
        if source.launch is not None:
            self._note_use(source.launch, number, where, runs)
        if fqn and use.reader is not self.output:
            self.computes.add((where, self._direction(use.reader), fqn))

    def _note_reduced(self, use: Use) -> None:
        for number in {int(n) for n in use.content[:, SOURCE]}:
            source = self.found.sources[number]
            if source is not None and source.launch is not None:
                runs = use.content[use.content[:, SOURCE] == number]
                self._note_use(source.launch, number, self.position[use.reader], runs)
                if fqn := self.names.get(number):
                    self.computes.add((self.position[source.node], "backward", fqn))

    def _note_use(self, launch: fx.Node, number: int, where: int, runs: contents.Runs) -> None:
        self.uses.setdefault((launch, number), []).append(where)
        known = self.precision.get((launch, number), contents.EXACT)
        self.precision[launch, number] = min(known, int(runs[:, PRECISION].min()))

    def _source_name(self, number: int) -> str:
        source = self.found.sources[number]
        if source is None:
            return "nothing defined" if number == contents.UNDEFINED else "zeros"
        return self.parameter.get(source.node, source.node.name)

    def _bucket(self, node: fx.Node, sent: Sent) -> Bucket:
        launch = sent.launch
        if sent.problem and launch.kind in ("all_gather", "reduce_scatter"):
            self.problems.append(f"{launch.operator} ({node.name}): {sent.problem}")
        members = tuple(self._member(node, launch.kind, *row) for row in sent.content)
        uses = sorted(where for (of, _), places in self.uses.items() if of is node for where in places)
        waits = sorted(self.position[wait] for wait in collectives.waits_of(node))
        backward = [where for where in uses if where not in self.forward_positions]
        if launch.kind == "all_gather" and uses:
            direction: Direction = "forward" if len(backward) < len(uses) else "backward"
        else:
            direction = self._direction(node)
        ranks = collectives.argument(node, "group_size")
        scale = ranks if launch.kind == "all_gather" and isinstance(ranks, int) else 1
        return Bucket(
            kind=launch.kind,
            op=launch.op,
            group=launch.group,
            dtype=sent.dtype,
            numel=sent.numel * scale,
            members=members,
            direction=direction,
            launch=self.position[node],
            wait=waits[0] if waits else None,
            first_use=uses[0] if uses else None,
            backward_use=backward[0] if backward else None,
            node=node.name,
        )

    def _member(self, node: fx.Node, kind: collectives.Kind, offset: int, length: int, number: int) -> Member:
        source = self.found.sources[number]
        precision = self.precision.get((node, number), contents.EXACT)
        if source is None:
            self.problems.append(f"{node.name} sends {length} elements at offset {offset} that nothing defined")
            return Member("", offset, length, precision)
        fqn = self.names.get(number, "") if kind == "reduce_scatter" else self.parameter.get(source.node, "")
        if kind == "all_gather" and fqn and length != source.numel:
            self.problems.append(f"{node.name} gathers {length} of the {source.numel} elements of {fqn}'s shard")
        if kind == "all_gather" and not fqn and (made_of := self._parameters_alone(source.node)):
            self.problems.append(
                f"{node.name} gathers what {source.node.target} ({source.node.name}) made of {', '.join(made_of[:4])}, "
                "an operator that is not followed"
            )
        return Member(fqn, offset, length, precision)

    def _parameters_alone(self, node: fx.Node) -> list[str]:
        """Parameters that ``node`` is made of, if neither the batch nor anything that was sent goes into it."""
        needed = _ancestors([node])
        if any(n in self.found.sent or self.role.get(n) in ("batch", "value") for n in needed):
            return []
        return [fqn for n, fqn in self.parameter.items() if n in needed]


def _forward_nodes(graph: fx.Graph, outputs: Sequence[Value]) -> set[fx.Node]:
    """What the loss depends on; without a loss, what carries no mark of autograd's backward."""
    losses = [
        node
        for node, value in zip(returned(graph.output_node()), outputs, strict=True)
        if value.role == "loss" and _is_node(node)
    ]
    if not losses:
        return {node for node in graph.nodes if not node.meta.get("autograd_backward")}
    return _ancestors(losses)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(nodes)
    queue = list(found)
    for node in queue:
        fresh = [source for source in node.all_input_nodes if source not in found]
        found.update(fresh)
        queue.extend(fresh)
    return found


def _is_node(value: object) -> bool:
    return hasattr(value, "all_input_nodes")
