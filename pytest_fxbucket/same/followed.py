"""Data movement, followed byte by byte: behind launches, into launches, and into buffers."""

from __future__ import annotations

from collections.abc import Set
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.graph import collectives, contents
from pytest_fxbucket.graph.contents import NotFollowedError
from pytest_fxbucket.graph.effects import written, written_arguments
from pytest_fxbucket.graph.follow import hint
from pytest_fxbucket.graph.movement import execute
from pytest_fxbucket.graph.storages import base
from pytest_fxbucket.same.exact import ExactContents, Ranks, expression, gathered, reduced, scattered, spans
from pytest_fxbucket.same.state import WalkContext
from pytest_fxbucket.same.table import LIST, Const, OperatorEffect, const

if TYPE_CHECKING:
    from pytest_fxbucket.graph.contents import Runs

FOLLOWED = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
"""Kinds of launches whose results are known byte by byte."""
SENT = frozenset({"all_to_all", "broadcast"})
"""Kinds whose result is one new source, made of the bytes that are sent; it is followed on from there."""


class FollowedExpressions:
    """The values of a graph that are followed, as meta tensors, and what their storages hold."""

    def __init__(self, context: WalkContext) -> None:
        self.context = context
        self.memory = ExactContents(context.table)
        self.values: dict[fx.Node, Any] = {}
        self.brought: set[fx.Node] = set()
        """Nodes known by their bytes: they came out of a launch, or lie in a buffer that data is moved into."""
        self._packed, self._buffers = _into_launches(context)
        # By node the version of its storage and the expression at that version.
        self._known_bytes: dict[fx.Node, tuple[int, int]] = {}
        self._roots: dict[Any, list[fx.Node]] = {}
        """By storage the computed nodes that lie in it and are followed into launches from there."""
        self._rooted: set[int] = set()

    def read(self, node: fx.Node) -> int:
        """The expression that ``node`` stands for now."""
        return self.bytes(node) if node in self.brought else self.context.value(node)

    def concerns(self, node: fx.Node) -> bool:
        """Whether ``node``, which moves data, moves data that is followed, or data that goes into a launch."""
        if node.target is getitem:
            return node.args[0] in self.values
        return node in self._packed or not self.brought.isdisjoint(inputs_of(node))

    def begin(self, node: fx.Node) -> bool:
        """Make ``node`` a followed buffer; False if no data is moved into it, or if its layout in memory is not certain."""
        # ``empty_like`` takes the layout of its input. Meta tensors of computed inputs are contiguous here, the real ones may
        # not be.
        if node not in self._buffers or not all(map(self._is_contiguous, inputs_of(node))):
            return False
        self.values[node] = execute(node, map_arg(node.args, self.known), dict(node.kwargs), self.memory)
        self.brought.add(node)
        return True

    def move(self, node: fx.Node, operator: OperatorEffect) -> bool:
        """Follow ``node``; whether its value is known by its bytes from now on."""
        if operator.effects.writes and not all(target in self.brought for target in written(node)):
            return False  # Memory of the model's own is written: that is known by states, not by bytes.
        if operator.by_memory and node.all_input_nodes[0] not in self.brought:
            return False  # Only the kernel that computed the input knows how it lies in memory.
        try:
            args, kwargs = map_arg(node.args, self.known), map_arg(node.kwargs, self.known)
            self.values[node] = execute(node, args, kwargs, self.memory)
        except NotFollowedError:
            return False
        if not self.brought.isdisjoint(inputs_of(node)):
            self.brought.add(node)
            return True
        # Computed data on its way into a launch has both: bytes for the launch, and an expression for its other readers. A copy
        # lies in a storage of its own, writes to which must be seen; of a view they are seen at its base.
        if not operator.view and self.context.states.changing:
            self._root(node)
        return False

    def _is_contiguous(self, node: fx.Node) -> bool:
        if node in self.brought:
            return True
        value = self.context.table.facts.get(self.context.made[node])
        return not isinstance(value, torch.Tensor) or value.is_contiguous()

    def known(self, node: fx.Node) -> Any:
        """The meta tensor of ``node``; a computed value that was not followed before is followed from here on."""
        if node not in self.values:
            self.values[node] = self._new(node, self.context.table.facts.get(self.context.made[node]))
            if self.context.states.changing:
                self._root(node)
        return self.values[node]

    def changed(self, target: fx.Node, out: int, node: fx.Node) -> None:
        """``node`` writes the expression ``out`` to the storages of ``target``, which are known by their states."""
        # All tensors that are followed from those storages hold something else now, so each is read anew.
        context, state = self.context, self.context.states.state
        for home in context.states.of(target):
            # What the target is made of says which part of the storage is written, ``out`` with what.
            state[home] = context.number(("write", state.get(home, 0), context.made[target], out), node)
            for one in self._roots.get(home, ()):
                number, value = self.read(one), self.values[one]
                if isinstance(value, torch.Tensor):
                    self._hold(value, number)
                    continue
                for index, tensor in enumerate(collectives.tensors(value)):
                    self._hold(tensor, context.number(("item", number, const(index)), node))

    def bytes(self, node: fx.Node) -> int:
        """The expression that ``node``, which is known by its bytes, stands for now."""
        value = self.values[node]
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                return self.context.number((LIST, *(self.of_tensor(one, node) for one in value)), node)
            return self.context.number(("value", const(value)), node)
        version = self.memory.version(value)
        known = self._known_bytes.get(node)
        if known is None or known[0] != version:
            known = self._known_bytes[node] = version, self.of_tensor(value, node)
        return known[1]

    def of_tensor(self, tensor: torch.Tensor, node: fx.Node) -> int:
        """The expression that ``tensor``, a value of ``node``, stands for now."""
        found = expression(self.context.table, tensor, self.memory)
        if isinstance(found, int):
            self.context.node_of.setdefault(found, node)
            return found
        number = self.context.number(found, node)
        self.context.learn(number, tensor)
        return number

    def _root(self, node: fx.Node) -> None:
        """Note that writes to the storages of ``node`` change what is followed from it; once for each of its meta storages."""
        keys = {storage_key(tensor) for tensor in collectives.tensors(self.values[node])}
        if not keys <= self._rooted:
            self._rooted |= keys
            for home in self.context.states.of(node):
                self._roots.setdefault(home, []).append(node)

    def _new(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return hint(value)
        if isinstance(value, (list, tuple)):
            raise ValueError(f"{node.name} is a list that data is moved out of")
        if not isinstance(value, torch.Tensor):
            if value is None:
                raise ValueError(f"{node.name} carries no fake value (meta['val']) to tell its shape by")
            return value
        new = torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
        self.memory.define(new, ())
        self._hold(new, self.context.value(node))
        return new

    def _hold(self, tensor: torch.Tensor, number: int) -> None:
        self.memory.define(tensor, contents.run(number, tensor.nbytes, contents.EXACT, tensor.dtype))


def _into_launches(context: WalkContext) -> tuple[Set[fx.Node], Set[fx.Node]]:
    """Nodes through which data moves into launches, and new buffers that data is moved into."""
    # As ``_leads_to_launch`` of :mod:`pytest_fxbucket.graph.follow` does, backwards: every reader, and every write to a storage
    # that is launched, is met before what it reads.
    packed: set[fx.Node] = set()
    storages: set[fx.Node] = set()
    buffers: set[fx.Node] = set()
    for node in reversed(context.nodes):
        if node.op != "call_function":
            continue
        operator = context.operator(node)
        if operator.moves:
            leads = node in packed
            if operator.effects.writes:
                targets = [base(target) for target in written_arguments(node)]
                buffers.update(one for one in targets if one.op == "call_function" and context.operator(one).is_new)
                leads = leads or any(target in storages for target in targets)
        else:
            leads = operator.launches in FOLLOWED or operator.launches in SENT
        if leads:
            packed.update(inputs_of(node))
            storages.update(map(base, inputs_of(node)))
    return packed, buffers


# Results of launches, made from the bytes that their members send.


class GraphLaunches:
    """The launches of one graph, in its order."""

    def __init__(self, followed: FollowedExpressions) -> None:
        self.sent: list[tuple[Ranks, int]] = []
        """For each launch its ranks, and the expression of what it sends."""
        self._followed, self._table = followed, followed.context.table
        self._ranks_of: dict[int, int] = {}
        """The number of ranks that a source was gathered over, by all its gathers together."""

    def members(self, node: fx.Node) -> Ranks:
        """The ranks of the launch ``node``; none if its group is not known."""
        return self._followed.context.members.get(str(collectives.argument(node, "group_name") or ""), ())

    def launch(self, node: fx.Node, operator: OperatorEffect) -> bool:
        """Follow the launch ``node`` byte by byte; False if that cannot be done for its kind, group or inputs."""
        members, size, nodes = self.members(node), collectives.argument(node, "group_size"), collectives.tensors_sent(node)
        odd = isinstance(size, int) and size != len(members)
        if operator.launches not in FOLLOWED or not members or not nodes or odd or operator.effects.chained:
            return False
        out = node.kwargs.get("out")
        buffers: list[Any] = [out] if isinstance(out, fx.Node) else nodes if operator.effects.writes else []
        results = []
        for index, one in enumerate(nodes):
            tensor: torch.Tensor = self._followed.known(one)
            runs = self._followed.memory.read(tensor)
            shape, brought = self._over(node, operator.launches or "", members, tensor, runs)
            if index < len(buffers):
                results.append(self._filled(node, buffers[index], brought))
            else:
                new = torch.empty(shape, dtype=tensor.dtype, device="meta")
                results.append(self._followed.memory.allocate(new, brought))
        self._followed.values[node] = results if isinstance(collectives.sent_by(node), (list, tuple)) else results[0]
        self._followed.brought.add(node)
        return True

    def sent_whole(self, node: fx.Node, operator: OperatorEffect) -> fx.Node | None:
        """The node that the launch ``node`` sends, if the launch is of a kind in SENT and its result is a new tensor."""
        sent = collectives.sent_by(node)
        if operator.launches not in SENT or operator.effects.writes or operator.effects.chained or not self.members(node):
            return None
        return sent if isinstance(sent, fx.Node) else None

    def elements(self, sent: fx.Node, node: fx.Node) -> int:
        """The expression of the elements of ``sent`` in logical order, flat: the shape in which ``node`` sends is no matter."""
        tensor: torch.Tensor = self._followed.known(sent)
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
        return self._followed.of_tensor(self._followed.memory.allocate(flat, self._followed.memory.read(tensor)), node)

    def bring(self, node: fx.Node, sent: fx.Node, number: int) -> None:
        """Follow the result of the launch ``node`` from here on: all its bytes are of the source ``number``."""
        tensor, fact = self._followed.known(sent), self._table.facts.get(number)
        if not isinstance(fact, torch.Tensor):
            return
        exchanges = collectives.launch_kind(node) == "all_to_all"
        new = torch.empty(
            [hint(fact.shape[0]), *tensor.shape[1:]] if exchanges else tensor.shape, dtype=tensor.dtype, device="meta"
        )
        runs = contents.run(number, new.nbytes, contents.EXACT, new.dtype)
        self._followed.values[node] = self._followed.memory.allocate(new, runs)
        self._followed.brought.add(node)

    def note(self, members: Ranks, number: int) -> None:
        """Note a launch that is known as a whole, by the expression ``number``."""
        self.sent.append((members, number))

    def _over(self, node: fx.Node, kind: str, members: Ranks, tensor: torch.Tensor, runs: Runs) -> tuple[list[int], Runs]:
        """Shape and content of the result of a launch for one ``tensor``, which holds ``runs``; notes what is sent."""
        op = str(collectives.argument(node, "reduce_op") or "")
        how = Const("launch", f"{kind} {op}"), Const("tensor", f"{tensor.dtype} {tuple(tensor.shape)}")
        self.sent.append((members, self._table.number(("sent", *how, *spans(runs)))))
        shape, count = list(tensor.shape), len(members)
        if kind == "all_reduce":
            return shape, reduced(self._table, runs, op, tensor.dtype, members)
        if kind == "all_gather":
            whole = [shape[0] * count, *shape[1:]] if shape else [count]
            return whole, gathered(self._table, runs, tensor.nbytes, members, self._ranks_of)
        if shape[0] % count:
            raise ValueError(f"{shape[0]} rows cannot be scattered to {count} ranks")
        own = [shape[0] // count, *shape[1:]]
        return own, scattered(self._table, runs, tensor.nbytes // count, op, tensor.dtype, members)

    def _filled(self, node: fx.Node, buffer: fx.Node, runs: Runs) -> torch.Tensor:
        """The meta tensor of ``buffer``, which the launch ``node`` fills with ``runs``."""
        followed = self._followed
        tensor: torch.Tensor = followed.known(buffer)
        followed.memory.write(tensor, runs)
        if buffer not in followed.brought:
            followed.changed(buffer, followed.of_tensor(tensor, node), node)
            followed.memory.write(tensor, runs)  # Once more: ``changed`` has read the buffer anew, by its states.
        return tensor
