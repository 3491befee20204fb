"""One graph, node by node: the expression that each value stands for.

Compute is known by its operator and its arguments. Results of launches, data moved on from there, and data moved into launches
are known by their bytes, since a pass may pack and unpack in any way that leaves each byte where it belongs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives, contents
from pytest_fxbucket.graph.contents import precision_of
from pytest_fxbucket.graph.effects import written
from pytest_fxbucket.graph.ops import returned, returns_written
from pytest_fxbucket.same.exact import Ranks, among
from pytest_fxbucket.same.followed import FollowedExpressions, GraphLaunches
from pytest_fxbucket.same.state import WalkContext, digest_of
from pytest_fxbucket.same.table import LIST, PLAIN, Const, ExpressionTable, Key, OperatorEffect, const


class Walk:
    """The walk over ``graph``; ``inputs`` are names of its inputs in order, the rest is as for :class:`WalkContext`.

    Raises :class:`PassError` for a graph that cannot be run.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: torch.nn.Module,
        table: ExpressionTable,
        inputs: Sequence[str],
        members: Mapping[str, Ranks],
        homes: Mapping[int, Any],
    ) -> None:
        self._context = WalkContext(graph, root, table, members, homes)
        self._made, self._number, self._learn = self._context.made, self._context.number, self._context.learn
        self.nodes = self._context.nodes
        self.node_of = self._context.node_of
        """The node at which each expression is met first."""
        self._followed = FollowedExpressions(self._context)
        self._launching = GraphLaunches(self._followed)
        self.sent = self._launching.sent
        """For each launch its ranks, and the expression of what it sends."""
        self._brought, self._states = self._followed.brought, self._context.states
        self._inputs = iter(inputs)
        self._items: dict[fx.Node, tuple[int, ...]] = {}
        """For a node that computes member by member (foreach) the expression of each member."""
        self.computed: Counter[int] = Counter()
        """How often each expression is computed."""
        self.draws = self.world = table.number(("start",))
        """Expressions of the random state, and of all that was done to the world so far; each contains the one before."""
        for node in self.nodes:
            try:
                self._visit(node)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                why = " ".join(str(error).split())[:200]
                raise PassError(f"the graph cannot be followed: {node.target} ({node.name}): {why}") from error

    def outputs(self) -> list[int]:
        """The expression of each output, in order."""
        said = map(self._key_of, returned(self.nodes[-1]))
        return [one if type(one) is int else self._context.table.number((LIST, one)) for one in said]

    def left_in_inputs(self) -> list[int]:
        """The expression that each input holds at the end, in order."""
        return [self._followed.read(node) for node in self.nodes if node.op == "placeholder"]

    def left_in_attributes(self) -> dict[str, int]:
        """The expression that each attribute holds at the end, by name, of attributes that the graph writes."""
        held = [node for node in self.nodes if node.op == "get_attr" and self._states.state and self._states.now(node)]
        return {str(node.target): self._followed.read(node) for node in held}

    def _visit(self, node: fx.Node) -> None:
        # Most nodes are plain compute, so that comes first. Movement is followed by bytes if it is near a launch; elsewhere it
        # is told by operator and arguments, like compute.
        if node.op == "call_function":
            operator = self._context.operator(node)
            if operator.is_plain:
                self._compute(node, operator)
            elif operator.launches is not None:
                if not self._launching.launch(node, operator):
                    self._launch_as_a_whole(node, operator)
            elif operator.same:
                self._as_it_is(node)
            elif operator.moves:
                self._move(node, operator)
            else:
                self._compute(node, operator)
        elif node.op == "placeholder":
            self._begin(node, ("input", Const("input", next(self._inputs))))
        elif node.op == "get_attr":
            self._begin(node, ("attribute", Const("bytes", digest_of(self._context.root, str(node.target)))))
        elif node.op != "output":
            self._compute(node, self._context.operator(node))

    def _begin(self, node: fx.Node, key: Key) -> int:
        """The number of ``key``, for which ``node`` stands from now on."""
        self._made[node] = number = self._number(key, node)
        self._learn(number, node.meta.get("val"))
        return number

    def _as_it_is(self, node: fx.Node) -> None:
        source = next(iter(inputs_of(node)))
        if source in self._followed.values:
            self._followed.values[node] = self._followed.values[source]
        if source in self._brought:
            self._brought.add(node)
            return
        self._made[node] = self._made[source]
        if source in self._items:
            self._items[node] = self._items[source]

    def _move(self, node: fx.Node, operator: OperatorEffect) -> None:
        if operator.is_new and self._followed.begin(node):
            return
        if self._followed.concerns(node) and self._followed.move(node, operator):
            return
        if node.target is getitem and (items := self._items.get(node.all_input_nodes[0])) is not None:
            self._item(node, items)
        elif operator.cast is not None and (cast := self._cast(node, operator.cast(node))) is not None:
            self._begin(node, cast)
        else:
            self._compute(node, operator)

    def _item(self, node: fx.Node, items: tuple[int, ...]) -> None:
        """``node`` takes an item of ``items``, which an operator computed member by member.

        If the operator gives a list of lists, the item is itself a list, with a part of what each member gave.
        """
        source, index = node.all_input_nodes[0], node.args[1]
        assert isinstance(index, int)
        if source.op == "call_function" and self._context.operator(source).nested:
            parts = self._items[node] = tuple(self._number(("item", one, const(index)), node) for one in items)
            self._begin(node, (LIST, *parts))
        else:
            self._made[node] = items[index]
            self._learn(items[index], node.meta.get("val"))

    def _cast(self, node: fx.Node, dtype: object) -> Key | None:
        """The expression of a cast, the same as for a cast that is folded into a pack; None if it is no plain cast."""
        source = self._followed.read(node.all_input_nodes[0])
        fact = self._context.table.facts.get(source)
        if dtype is None or not isinstance(fact, torch.Tensor):
            return None
        return ("cast", source, const(fact.dtype), const(dtype))

    def _compute(self, node: fx.Node, operator: OperatorEffect) -> None:
        said = self._arguments(node, operator)
        if operator.is_plain:
            self.computed[self._begin(node, (operator.label, *said))] += 1
            return
        said = (*said, *self._moment(operator))
        # A foreach is told member by member, so that a pass may split or join it.
        parts = _members(said) if operator.by_member else None
        numbers: tuple[int, ...] = ()
        if parts is not None:
            numbers = self._items[node] = tuple(self._number((operator.label, *part), node) for part in parts)
        number = self._begin(node, (operator.label, *said) if parts is None else (LIST, *numbers))
        if operator.left:
            self._context.table.left.setdefault(number, operator.left)
        if not operator.moves:  # Data that is moved twice is no waste: packing is the pass's own business.
            self.computed.update(numbers or (number,))
        self._act(node, operator, number, numbers)

    def _moment(self, operator: OperatorEffect) -> Key:
        """For an operator that draws or acts on the world: all draws and actions before it, as part of its expression."""
        effects = operator.effects
        drawn = (("drawn", self.draws),) if effects.random or effects.barrier else ()
        return (*drawn, ("after", self.world)) if effects.chained or effects.barrier else drawn

    def _act(self, node: fx.Node, operator: OperatorEffect, number: int, numbers: tuple[int, ...] = ()) -> None:
        """Note the side effects of ``node``, whose result is ``number`` or, member by member, ``numbers``."""
        effects = operator.effects
        if effects.random or effects.barrier:
            self.draws = self._number(("drawn", number), node)
        if effects.chained or effects.barrier:
            self.world = self._number(("done", number), node)
        if effects.writes or effects.everything:
            self._write(node, number, numbers)

    def _write(self, node: fx.Node, number: int, numbers: tuple[int, ...]) -> None:
        """From now on the arguments that ``node`` writes hold what it computed."""
        targets = written(node)
        # Written arguments of a foreach come list by list, so the member repeats and the list is counted by the quotient.
        for index, target in enumerate(targets):
            said = numbers[index % len(numbers)] if numbers else number
            out = self._number(("written", said, const(index // len(numbers) if numbers else index)), node)
            if target not in self._brought:
                self._followed.changed(target, out, node)
                continue
            for tensor in collectives.tensors(self._followed.values[target]):
                runs = contents.run(out, tensor.nbytes, precision_of(tensor.dtype), tensor.dtype)
                self._followed.memory.write(tensor, runs)
        if targets and returns_written(node):
            self._as(node, targets[0])

    def _as(self, node: fx.Node, target: fx.Node) -> None:
        """``node`` returns ``target``, which it wrote: both are the same value."""
        if target in self._brought:
            self._followed.values[node] = self._followed.values[target]
            self._brought.add(node)
        else:
            self._made[node] = self._made[target]

    def _launch_as_a_whole(self, node: fx.Node, operator: OperatorEffect) -> None:
        """A launch that is not followed byte by byte: its expression has its arguments, with the ranks of its group.

        If its kind allows, what it sends is in the expression by elements instead of by shape, and its result is followed on.
        """
        group, members = const(str(collectives.argument(node, "group_name") or "")), self._launching.members(node)
        # The name of the group gives way to its ranks, since a pass may launch on another group of the same ranks.
        said = tuple(among(members) if members and one == group else one for one in self._arguments(node, operator))
        sent = self._launching.sent_whole(node, operator)
        if sent is not None:
            said = (self._launching.elements(sent, node), *said[1:])
        number = self._begin(node, (operator.label, *said, *self._moment(operator)))
        self._launching.note(members, number)
        self._act(node, operator, number)
        if sent is not None:
            self._launching.bring(node, sent, number)

    def _arguments(self, node: fx.Node, operator: OperatorEffect) -> Key:
        """All arguments in the order of the schema, those left out as their defaults."""
        args, kwargs, defaults = node.args, node.kwargs, operator.defaults
        said = [self._key_of(value) for value in args]
        if operator.view and self._states.changing and args and isinstance(args[0], fx.Node) and args[0] not in self._brought:
            # A view shows what its memory holds when it is read, not when it was made: so the states of its input are left out.
            said[0] = self._made[args[0]]
        if len(said) < len(defaults):
            for name, default in defaults[len(said) :]:
                said.append(self._key_of(kwargs[name]) if name in kwargs else default)
        elif kwargs and not defaults:  # A target without a schema: its arguments by name get a fixed order.
            said += [(name, self._key_of(value)) for name, value in sorted(kwargs.items())]
        return tuple(said)

    def _key_of(self, value: Any) -> Any:
        kind = type(value)
        if kind is fx.Node:
            return self._followed.read(value)
        if kind in PLAIN:
            return const(value)
        if isinstance(value, (list, tuple)):
            return (LIST, *map(self._key_of, value))
        if kind is dict:
            return ("{", *((str(key), self._key_of(one)) for key, one in sorted(value.items())))
        if kind is slice:
            return ("slice", self._key_of(value.start), self._key_of(value.stop), self._key_of(value.step))
        return const(value)


def _members(said: Key) -> list[Key] | None:
    """The arguments of each member, if all lists among ``said`` are of one length; None if they are not, or there are none."""
    lists = [type(one) is tuple and len(one) > 1 and one[0] == LIST for one in said]
    counts = {len(one) - 1 for one, listed in zip(said, lists, strict=True) if listed}
    if len(counts) != 1:
        return None
    return [
        # Item 0 of a list is LIST. What is no list, such as a learning rate, is an argument of every member.
        tuple(one[index + 1] if listed else one for one, listed in zip(said, lists, strict=True))
        for index in range(counts.pop())
    ]
