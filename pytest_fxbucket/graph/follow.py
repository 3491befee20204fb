"""Follows every parameter and gradient through pack, launch, wait and unpack of one graph.

The walk meets nodes in order. What only moves data is executed symbolically; a launch moves data between ranks; anything else
is compute: it starts new sources and ends the following of old ones, and is noted as a reader of what it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.pytree import tree_map
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives, contents
from pytest_fxbucket.graph.collectives import Launch
from pytest_fxbucket.graph.contents import LENGTH, OFFSET, OWN_RANK, PRECISION, RANK, SOURCE, START, Runs
from pytest_fxbucket.graph.hazards import base
from pytest_fxbucket.graph.movement import Memory, NotFollowedError, execute, is_new_storage, joins, moves_data, precision_of
from pytest_fxbucket.graph.ops import written_arguments

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, slots=True)
class Source:
    """Where elements come from."""

    node: fx.Node
    numel: int
    dtype: torch.dtype
    launch: fx.Node | None = None
    """The launch that brought it: the reduction of ``node``'s elements, or their gather; None for what ``node`` computed."""


@dataclass(slots=True)
class Sent:
    """A launch, and what its input holds."""

    launch: Launch
    index: int
    """Position among all launches of the graph."""
    dtype: torch.dtype | None
    numel: int
    """Elements of the input on one rank."""
    content: list[tuple[int, int, int]] = field(default_factory=list)
    """(offset, length, source) of each member on this rank: for a gather of its input, for a reduction of its result."""
    problem: str = ""
    """Why the content could not be told; empty if it could."""


@dataclass(frozen=True, slots=True)
class Use:
    """A compute node (or the graph's output) and one value that it reads."""

    reader: fx.Node
    value: fx.Node
    content: Runs


@dataclass(slots=True)
class Followed:
    """Everything that the walk found."""

    sources: list[Source | None] = field(default_factory=lambda: [None, None])
    sent: dict[fx.Node, Sent] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Data movement that could not be told; what it gave counts as computed."""


def follow(graph: fx.Graph) -> Followed:
    """Walk ``graph`` once; cost grows with its nodes and with members times ranks of its launches."""
    walk = _Walk(graph)
    with _one_thread():
        for node in graph.nodes:
            _visit(walk, node)
    return walk.found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tables of runs are small: on a busy machine waking threads for them costs five times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _visit(walk: _Walk, node: fx.Node) -> None:
    try:
        walk.visit(node)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        given = ", ".join(source.name for source in node.all_input_nodes)
        why = " ".join(str(error).split())[:200]
        raise PassError(f"the graph cannot be run: {node.target} ({node.name}) of {given}: {why}") from error


class _Walk:
    def __init__(self, graph: fx.Graph) -> None:
        self.found = Followed()
        self.memory = Memory()
        self.values: dict[fx.Node, Any] = {}
        self.packed = _leads_to_launch(graph)
        self.buffers = {base(target) for node in graph.nodes if moves_data(node) for target in written_arguments(node)}

    def visit(self, node: fx.Node) -> None:
        launch = collectives.read_launch(node)
        if launch is not None:
            self._launch(launch)
        elif collectives.is_wait(node):
            if (value := self._value(collectives.sent_by(node))) is not None:
                self.values[node] = value
        elif node in self.packed or self._continues(node) or (node in self.buffers and is_new_storage(node)):
            self._move(node)
        else:
            self._read(node)

    def _continues(self, node: fx.Node) -> bool:
        """Whether ``node`` moves data that came out of a launch, and is no use that the model makes of it."""
        if not moves_data(node) or not any(source in self.values for source in node.all_input_nodes):
            return False
        return not (joins(node) and all(self._is_whole(source) for source in node.all_input_nodes))

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether ``node`` is one gathered parameter from its beginning, as far as it was gathered at all."""
        for tensor in _tensors(self.values.get(node)):
            runs = self.memory.read(contents.in_memory_order(tensor))
            source = self.found.sources[int(runs[0, SOURCE])] if len(runs) else None
            if source is None or int(runs[0, START]) or int(runs[0, RANK]) or not contents.ascends(runs, source.numel):
                return False
        return True

    def _move(self, node: fx.Node) -> None:
        if not moves_data(node):
            self._start(node)
            self._read(node)
            return
        args, kwargs = tree_map(self._known, (node.args, dict(node.kwargs)), is_leaf=_is_node)
        try:
            self.values[node] = execute(node, args, kwargs, self.memory)
        except NotFollowedError as error:
            self.found.problems.append(f"{node.target} ({node.name}) is not followed: {error}")
            self._start(node)
            self._read(node)

    def _known(self, value: Any) -> Any:
        if not _is_node(value):
            return value
        if value not in self.values:
            self._start(value)
        return self.values[value]

    def _start(self, node: fx.Node) -> None:
        """``node`` computes something new: its tensors become sources."""
        if node.meta.get("val") is None:
            raise ValueError(f"{node.name} carries no fake value (meta['val']) to tell its shape by")
        self.values[node] = tree_map(
            lambda value: self._source(node, value) if isinstance(value, torch.Tensor) else value, node.meta.get("val")
        )

    def _source(self, node: fx.Node, like: torch.Tensor) -> torch.Tensor:
        numel = int(like.numel())
        self.found.sources.append(Source(node, numel, like.dtype))
        return self.memory.allocate(like, contents.run(len(self.found.sources) - 1, numel, precision_of(like.dtype)))

    def _value(self, argument: Any) -> Any:
        return self.values.get(argument) if _is_node(argument) else None

    def _read(self, node: fx.Node) -> None:
        """Note what compute reads of what launches brought, and forget what it overwrites."""
        for source in node.all_input_nodes:
            for tensor in _tensors(self.values.get(source)):
                self.found.uses.append(Use(node, source, self.memory.read(contents.in_memory_order(tensor))))
        for written in written_arguments(node):
            for tensor in _tensors(self.values.get(written)):
                self.found.sources.append(Source(node, int(tensor.numel()), tensor.dtype))
                self.memory.write(
                    tensor, contents.run(len(self.found.sources) - 1, int(tensor.numel()), precision_of(tensor.dtype))
                )

    def _launch(self, launch: Launch) -> None:
        argument = collectives.sent_by(launch.node)
        sent = Sent(launch, len(self.found.sent), None, 0)
        self.found.sent[launch.node] = sent
        if not _is_node(argument):
            sent.problem = f"{launch.operator} launches several tensors at once, which is not followed"
            return
        tensor = self._known(argument)
        sent.dtype, sent.numel = tensor.dtype, int(tensor.numel())
        content, ranks = self.memory.read(tensor), collectives.argument(launch.node, "group_size")
        if launch.kind == "all_gather" and isinstance(ranks, int):
            self._gather(sent, tensor, content, ranks)
        elif launch.kind == "reduce_scatter" and isinstance(ranks, int):
            self._scatter(sent, tensor, content, ranks)
        else:
            sent.problem = f"{launch.operator} is not followed"
            self._start(launch.node)

    def _gather(self, sent: Sent, tensor: torch.Tensor, content: Runs, ranks: int) -> None:
        node, numel = sent.launch.node, int(tensor.numel())
        if bool((content[:, RANK] != OWN_RANK).any()):
            sent.problem = "it gathers what another launch gathered, which is not followed"
            self._start(node)
            return
        content = self._gathered(content, node)
        sent.content = [(r[OFFSET], r[LENGTH], r[SOURCE]) for r in content.tolist()]
        rows = content.repeat(ranks, 1)
        rank = torch.arange(ranks).repeat_interleave(len(content))
        rows[:, OFFSET] += rank * numel
        rows[:, RANK] = rank
        rows[:, RANK] = torch.where(rows[:, SOURCE] > contents.ZERO, rows[:, RANK], OWN_RANK)
        out = node.kwargs.get("out")
        if out is None:
            shape = (tensor.shape[0] * ranks, *tensor.shape[1:]) if tensor.dim() else (ranks,)
            self.values[node] = self.memory.allocate(torch.empty(shape, dtype=tensor.dtype, device="meta"), rows)
        else:
            self.values[node] = self._known(out)
            self.memory.write(self.values[node], rows)

    def _gathered(self, content: Runs, launch: fx.Node) -> Runs:
        """The same runs of sources that say by which launch they came."""
        out = content.clone()
        for number in torch.unique(content[:, SOURCE]).tolist():
            source = self.found.sources[number]
            if source is not None:
                out[content[:, SOURCE] == number, SOURCE] = len(self.found.sources)
                self.found.sources.append(Source(source.node, source.numel, source.dtype, launch))
        return out

    def _scatter(self, sent: Sent, tensor: torch.Tensor, content: Runs, ranks: int) -> None:
        node, numel = sent.launch.node, int(tensor.numel()) // ranks
        first = contents.read(content, torch.empty(numel, device="meta"))
        first = first[first[:, SOURCE] > contents.ZERO]
        if not self._scattered_evenly(first, content, numel, ranks):
            sent.problem = "it does not send each rank the same piece of every gradient"
            self._start(node)
            return
        rows = []
        for offset, length, number, precision in first[:, [OFFSET, LENGTH, SOURCE, PRECISION]].tolist():
            source = self.found.sources[number]
            assert source is not None
            self.found.sources.append(Source(source.node, length, source.dtype, node))
            sent.content.append((offset, length, len(self.found.sources) - 1))
            rows.append(contents.shifted(contents.run(len(self.found.sources) - 1, length, precision), offset))
        shape = (tensor.shape[0] // ranks, *tensor.shape[1:])
        result = torch.empty(shape, dtype=tensor.dtype, device="meta")
        self.values[node] = self.memory.allocate(result, torch.cat(rows) if rows else contents.run(0, numel))

    def _scattered_evenly(self, first: Runs, content: Runs, numel: int, ranks: int) -> bool:
        """Whether rank k's part of the input is, member by member, the k-th piece of the same whole gradients."""
        expected = []
        for offset, length, number, start in first[:, [OFFSET, LENGTH, SOURCE, START]].tolist():
            source = self.found.sources[number]
            assert source is not None
            piece = next((r[LENGTH] for r in first.tolist() if r[SOURCE] == number), 0)
            if start != 0 or piece != length or -(-source.numel // ranks) > length:
                return False
            index = torch.arange(ranks)
            have = (source.numel - index * length).clamp(0, length)
            row = first[first[:, SOURCE] == number][:1].repeat(ranks, 1)
            row[:, OFFSET], row[:, START], row[:, LENGTH] = offset + index * numel, index * length, have
            expected.append(row[have > 0])
        wanted = contents.joined(torch.cat(expected)[torch.sort(torch.cat(expected)[:, OFFSET]).indices])
        return torch.equal(wanted, content[content[:, SOURCE] > contents.ZERO])


def _leads_to_launch(graph: fx.Graph) -> set[fx.Node]:
    """Nodes through which data moves into a launch, writes into buffers among them, back to where it was computed."""
    found: set[fx.Node] = set()
    storages: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        leads = collectives.launch_kind(node) is not None
        if not leads and moves_data(node):
            leads = node in found or any(base(target) in storages for target in written_arguments(node))
        if leads:
            found.update(node.all_input_nodes)
            storages.update(map(base, node.all_input_nodes))
    return found


def _is_node(value: Any) -> bool:
    return isinstance(value, torch.fx.Node)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
