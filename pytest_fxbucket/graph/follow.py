"""Follows every parameter and gradient through pack, launch, wait and unpack of one graph.

The walk meets nodes in order. A node that only moves data is executed symbolically. A launch moves data between ranks. Any
other node is compute: it is noted as a reader of the values that it was given, and its own result is a new source.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg

from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.compat.pytree import tree_map
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives, contents
from pytest_fxbucket.graph.collectives import Launch, tensors
from pytest_fxbucket.graph.contents import ByteRange, NotFollowedError, Runs, StorageContents, precision_of
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.movement import execute, is_new_storage, joins, moves_data, reorders
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.sending import SentLaunch, Source, SourceTable
from pytest_fxbucket.graph.storages import base

if TYPE_CHECKING:
    from torch import fx

__all__ = ["FollowedValues", "SentLaunch", "Source", "Use", "follow"]


@dataclass(frozen=True, slots=True)
class Use:
    """A compute node (or the graph's output) and one value that it reads."""

    reader: fx.Node
    value: fx.Node
    dtype: torch.dtype
    content: Runs


@dataclass(slots=True)
class FollowedValues:
    """Everything that the walk found."""

    table: SourceTable = field(default_factory=SourceTable)
    sent: dict[fx.Node, SentLaunch] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Data movement that could not be followed, a sentence each; its result counts as computed."""

    @property
    def sources(self) -> list[Source | None]:
        """Sources by number; the first two (undefined bytes and zeros) are None."""
        return self.table.sources


def follow(graph: fx.Graph, anew: Collection[fx.Node] = ()) -> FollowedValues:
    """Walk ``graph`` once; cost grows with its nodes and with members times ranks of its launches.

    Each node in ``anew`` starts a source of its own, even if it only moves a part of what another node computed.
    A symbolic size counts as the number that it was traced with. Raises :class:`PassError` for a graph that cannot be run.
    """
    walk = _Walk(graph, anew)
    for node in graph.nodes:
        _visit(walk, node)
    return walk.found


def _visit(walk: _Walk, node: fx.Node) -> None:
    # The real operators run on meta tensors here, so that a wrong size or argument raises what torch raises for it.
    try:
        walk.visit(node)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        given = ", ".join(source.name for source in node.all_input_nodes)
        why = " ".join(str(error).split())[:200]
        raise PassError(f"the graph cannot be run: {node.target} ({node.name}) of {given}: {why}") from error


class _Walk:
    def __init__(self, graph: fx.Graph, anew: Collection[fx.Node]) -> None:
        self.found = FollowedValues()
        self.memory = StorageContents()
        self.values: dict[fx.Node, Any] = {}
        self.moving = {node for node in graph.nodes if moves_data(node) and node not in anew}
        """Nodes that only move data."""
        self.several: set[fx.Node] = set()
        """Nodes that compute several tensors, of which a launch takes some: parts for the model itself are not followed."""
        self.packed = _leads_to_launch(graph, self.moving)
        self.changed = _changed(graph, self.moving)
        self.buffers = {base(target) for node in self.moving for target in written_arguments(node)}

    def visit(self, node: fx.Node) -> None:
        # Movement is followed in three places: on the way into a launch (``packed``), behind one, and into buffers. All other
        # movement is the model's own. Like compute, it is only noted as a reader, and gets no value unless a launch needs it.
        launch = collectives.read_launch(node)
        if launch is not None:
            self._launch(launch)
        elif collectives.is_wait(node):
            if (value := self._value(collectives.sent_by(node))) is not None:
                self.values[node] = value
        elif node in self.moving and (node in self.packed or self._continues(node) or self._is_buffer(node)):
            self._move(node)
        else:
            if node in self.packed:
                self._start(node)
            self._read(node)

    def _is_buffer(self, node: fx.Node) -> bool:
        """Whether data is moved into ``node``, a new buffer."""
        return node in self.buffers and is_new_storage(node)

    def _continues(self, node: fx.Node) -> bool:
        """Whether ``node`` moves data that came out of a launch and belongs to the unpacking, not to the model."""
        # The model may copy, join or permute gathered parameters, too. What no unpacking does counts as the model's reading:
        # a copy that compute writes to later, a join of whole parameters or of all ranks' parts of one, a changed order.
        if node in self.changed or not any(source in self.values and source not in self.several for source in inputs_of(node)):
            return False
        if joins(node) and (all(self._is_whole(source) for source in node.all_input_nodes) or self._is_side_by_side(node)):
            return False
        return not self._reorders(node)

    def _is_side_by_side(self, node: fx.Node) -> bool:
        """Whether ``node`` joins all ranks' parts of one source, in rank order, along another dimension than the first.

        This is how torch's functional all-gather makes a tensor whole that is sharded along that dimension.
        """
        firsts = [self._ascending(tensor) for source in node.all_input_nodes for tensor in tensors(self.values.get(source))]
        known = [first for first in firsts if first is not None]
        if collectives.argument(node, "dim") in (0, None) or len(known) < max(len(firsts), 2):
            return False
        return len({first.source for first in known}) == 1 and [first.rank for first in known] == list(range(len(known)))

    def _reorders(self, node: fx.Node) -> bool:
        """Whether ``node`` copies a gathered parameter, or a part of one, into an order that is the model's own."""
        given = self.values.get(node.all_input_nodes[0])
        return isinstance(given, torch.Tensor) and reorders(node, given) and self._ascending(given) is not None

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether each tensor of ``node`` that is followed is one gathered parameter, from the parameter's beginning on."""
        for tensor in tensors(self.values.get(node)):
            first = self._ascending(tensor)
            if tensor.numel() and (first is None or first.start or first.rank):
                return False
        return True

    def _ascending(self, tensor: torch.Tensor) -> ByteRange | None:
        """The first run of ``tensor`` in memory order, if ``tensor`` holds one gathered source in its order; else None."""
        runs = self.memory.read(contents.in_memory_order(tensor))
        source = self.found.sources[runs[0].source] if runs else None
        return runs[0] if source is not None and contents.ascends(runs, source.numel, source.ranks) else None

    def _move(self, node: fx.Node) -> None:
        args = map_arg(node.args, self._known)
        kwargs = map_arg(node.kwargs, self._known) if node.kwargs else {}
        # Asked before ``node`` writes: afterwards the buffer holds what was moved into it.
        replaced = [written for written in written_arguments(node) if self._is_computed(written)]
        try:
            self.values[node] = execute(node, args, kwargs, self.memory)
        except NotFollowedError as error:
            if not self._is_own(node):
                self.found.problems.append(f"{node.target} ({node.name}) is not followed: {error}")
            self._start(node)
            self._read(node)
        for written in replaced:
            self._computed(node, written)

    def _is_own(self, node: fx.Node) -> bool:
        """Whether all data that ``node`` moves was computed on this rank, so that its result can count as computed here."""
        runs = [
            one
            for source in inputs_of(node)
            for tensor in tensors(self.values.get(source))
            for one in self.memory.read(contents.in_memory_order(tensor))
        ]
        found = self.found.sources
        return all(one.rank == contents.OWN_RANK and _is_made(found[one.source]) for one in runs)

    def _is_computed(self, buffer: fx.Node) -> bool:
        """Whether ``buffer`` holds a gradient that autograd assembles: only autograd makes buffers by ``new_empty_strided``."""
        held = tensors(self.values.get(buffer)) if operator_name(base(buffer)) == "aten::new_empty_strided" else ()
        return any(one.source > contents.ZERO and one.rank == contents.OWN_RANK for t in held for one in self.memory.read(t))

    def _known(self, node: fx.Node) -> Any:
        if node not in self.values:
            self._start(node)
        return self.values[node]

    def _start(self, node: fx.Node) -> None:
        """``node`` computes something new: its tensors become sources."""
        value = node.meta.get("val")
        if value is None:
            raise ValueError(f"{node.name} carries no fake value (meta['val']) to tell its shape by")
        one = isinstance(value, torch.Tensor)
        if not one:
            self.several.add(node)
        self.values[node] = self._new(node, value) if one else tree_map(lambda part: self._new(node, part), value)

    def _new(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return hint(value) if isinstance(value, torch.SymInt) else value
        new = torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
        number = self.found.table.add(Source(node, new.numel(), new.dtype))
        self.memory.define(new, contents.run(number, new.nbytes, precision_of(new.dtype), new.dtype))
        return new

    def _value(self, argument: Any) -> Any:
        return self.values.get(argument) if isinstance(argument, torch.fx.Node) else None

    def _read(self, node: fx.Node) -> None:
        """Note which followed values the compute ``node`` reads; what it writes in place becomes a new source."""
        for source in inputs_of(node):
            if source not in self.values:
                continue
            for tensor in tensors(self.values[source]):
                content = self.memory.read(contents.in_memory_order(tensor))
                self.found.uses.append(Use(node, source, tensor.dtype, content))
        for written in written_arguments(node):
            self._computed(node, written)

    def _computed(self, node: fx.Node, written: fx.Node) -> None:
        """``node`` computed the values in ``written``, which become a new source."""
        whole = base(written)
        # A write to a view of a computed tensor makes all of that tensor one new source. Of an input or of a launch's result
        # only the written part is new: the rest is followed on.
        own = whole.op == "call_function" and not collectives.communicates(whole)
        for tensor in tensors(self.values.get(whole if own else written)):
            number = self.found.table.add(Source(node, tensor.numel(), tensor.dtype))
            self.memory.write(tensor, contents.run(number, tensor.nbytes, precision_of(tensor.dtype), tensor.dtype))

    def _launch(self, launch: Launch) -> None:
        several = isinstance(collectives.sent_by(launch.node), (list, tuple))
        sent = self.found.sent[launch.node] = SentLaunch(launch)
        nodes = collectives.tensors_sent(launch.node)
        results: list[tuple[torch.Tensor, Runs, Sequence[int]]] = []
        for node in nodes:
            tensor = self._known(node)
            brought = self._result_of(sent, tensor)
            if isinstance(brought, str):
                sent.problem = sent.problem or brought
            else:
                results.append((tensor, *brought))
            sent.numel += tensor.numel()
            sent.bytes += tensor.nbytes
            sent.symbolic = sent.symbolic or symbolic(node)
        dtypes = {self.values[node].dtype for node in nodes}
        sent.dtype = dtypes.pop() if len(dtypes) == 1 else None
        # Otherwise the launch has no value: movement behind it is taken for compute, and what a later launch sends is new.
        if nodes and len(results) == len(nodes):
            values = self._results(launch.node, results)
            self.values[launch.node] = values if several else values[0]

    def _result_of(self, sent: SentLaunch, tensor: torch.Tensor) -> tuple[Runs, Sequence[int]] | str:
        """(content, shape) of the result of the launch ``sent`` for one ``tensor``; or why its kind is not followed."""
        content, table = self.memory.read(tensor), self.found.table
        kind, ranks = sent.launch.kind, sent.launch.ranks
        if kind == "all_reduce":
            return table.summed(sent, tensor, content)
        if kind not in ("all_gather", "reduce_scatter") or not isinstance(ranks, int):
            return f"{sent.launch.operator} is not followed"
        if kind == "all_gather":
            return table.gathered(sent, tensor, content, ranks)
        return table.scattered(sent, tensor, content, ranks)

    def _results(self, launch: fx.Node, brought: Sequence[tuple[torch.Tensor, Runs, Sequence[int]]]) -> list[torch.Tensor]:
        """The results: in the buffer that the launch is given (``out``), in the tensors it reduces in place, or in new ones."""
        given = launch.kwargs.get("out")
        buffers = [self._known(given)] if isinstance(given, torch.fx.Node) else []
        values = []
        for index, (tensor, runs, shape) in enumerate(brought):
            if index < len(buffers):
                value = buffers[index]
            elif written_arguments(launch):
                value = tensor
            else:
                value = self.memory.allocate(torch.empty(list(shape), dtype=tensor.dtype, device="meta"))
            self.memory.write(value, runs)
            values.append(value)
        return values


def hint(size: int | torch.SymInt) -> int:
    """A size as a number: a symbolic size counts as the number that it was traced with, or 1 if that is not known."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return known if isinstance(known, int) else 1


def symbolic(node: fx.Node) -> str:
    """The first symbolic size of ``node``'s fake value, as text; empty if all sizes are numbers."""
    value = node.meta.get("val")
    return next((str(s) for s in value.shape if not isinstance(s, int)), "") if isinstance(value, torch.Tensor) else ""


def _leads_to_launch(graph: fx.Graph, moving: Set[fx.Node]) -> set[fx.Node]:
    """Nodes through which data moves into a launch, back to and with those that computed it. Writes into buffers count, too.

    ``moving`` are the nodes that only move data.
    """
    # Backwards, a node is met after all its readers, so it is known by then whether its result goes into a launch. A write
    # into a buffer has no reader: it counts if its storage was met on the way, which only launches behind it can have done.
    found: set[fx.Node] = set()
    storages: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in moving:
            leads = node in found or any(base(target) in storages for target in written_arguments(node))
        else:
            leads = collectives.launch_kind(node) is not None
        if leads:
            found.update(inputs_of(node))
            storages.update(map(base, inputs_of(node)))
    return found


def _is_made(source: Source | None) -> bool:
    return source is not None and source.launch is None and source.node.op == "call_function"


def _changed(graph: fx.Graph, moving: Set[fx.Node]) -> set[fx.Node]:
    """Storages that compute writes into. A copy of a gathered parameter in one of them is the model's, not the unpacking's."""
    computing = (node for node in graph.nodes if node not in moving and collectives.launch_kind(node) is None)
    return {base(target) for node in computing for target in written_arguments(node)}
