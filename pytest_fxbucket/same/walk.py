"""One graph, node by node: the expression that each value stands for.

What only computes is told by its operator and its arguments. What launches bring, and what moves data on from there, is followed
byte by byte, since packing and unpacking are what a pass may do anew; so is what moves data into launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from pytest_fxbucket.compat.fx_nodes import inputs_of
from pytest_fxbucket.compat.storage import storage_key
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives, contents
from pytest_fxbucket.graph.effects import effects_of, written
from pytest_fxbucket.graph.follow import hint
from pytest_fxbucket.graph.hazards import base
from pytest_fxbucket.graph.memory import NotFollowedError, precision_of
from pytest_fxbucket.graph.movement import execute
from pytest_fxbucket.graph.ops import returns_written, written_arguments
from pytest_fxbucket.same import ops
from pytest_fxbucket.same.attributes import digest_of
from pytest_fxbucket.same.exact import Exact, Ranks, among, expression, gathered, reduced, scattered, spans
from pytest_fxbucket.same.ops import Operator
from pytest_fxbucket.same.states import States
from pytest_fxbucket.same.table import LIST, Const, Key, Table, const

_FOLLOWED = ("all_gather", "reduce_scatter", "all_reduce")
_MEMBERS = Mapping[str, Ranks]


class Walk:
    """``graph``, whose ``inputs`` are named in order, in terms of ``table``.

    ``members`` are the ranks of each process group that it names, ``homes`` the storages of inputs that share one. Raises
    :class:`PassError` for a graph that cannot be run.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: torch.nn.Module,
        table: Table,
        inputs: Sequence[str],
        members: _MEMBERS,
        homes: Mapping[int, Any],
    ) -> None:
        self.graph, self.root, self.table, self.members = graph, root, table, members
        self.nodes = list(graph.nodes)
        self.node_of: dict[int, fx.Node] = {}
        """Where each expression of the graph is met at first."""
        self.computed: Counter[int] = Counter()
        """How often each expression is computed."""
        self.sent: list[tuple[Ranks, int]] = []
        """What each launch sends, and among whom."""
        self.draws = self.world = table.number(("start",))
        """Expressions of the random state, and of what was done to the world."""
        self._inputs = iter(inputs)
        self._first = len(table)
        self._operators: dict[int, Operator] = {}
        self._made: dict[fx.Node, int] = {}
        self._items: dict[fx.Node, tuple[int, ...]] = {}
        """Of what is computed member by member the expression of each."""
        self._values: dict[fx.Node, Any] = {}
        """Meta tensors of what is followed."""
        self._brought: set[fx.Node] = set()
        """What is told by its bytes: it came out of a launch, or lies in a buffer that data is moved into."""
        self._known_bytes: dict[fx.Node, tuple[int, int]] = {}
        self._roots: dict[Any, list[fx.Node]] = {}
        """Of each storage the nodes from which it is followed into launches."""
        self._rooted: set[int] = set()
        self._ranks_of: dict[int, int] = {}
        self._memory = Exact(table)
        self._states = States(self.nodes, root, homes)
        self._packed, self._buffers = self._into_launches()
        for node in self.nodes:
            try:
                self._visit(node)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                why = " ".join(str(error).split())[:200]
                raise PassError(f"the graph cannot be followed: {node.target} ({node.name}): {why}") from error

    def read(self, node: fx.Node) -> int:
        """The expression that ``node`` stands for now."""
        if node in self._brought:
            return self._bytes(node)
        made = self._made[node]
        if self._states.state and (states := self._states.now(node)):
            return self._number(("seen", made, states), node)
        return made

    def outputs(self) -> list[int]:
        """The expression of each output, in order."""
        returned = self.graph.output_node().args[0]
        return [self._plain(self._said(one)) for one in (returned if isinstance(returned, (list, tuple)) else [returned])]

    def left_in_inputs(self) -> list[int]:
        """What each input holds at the end."""
        return [self.read(node) for node in self.nodes if node.op == "placeholder"]

    def left_in_attributes(self) -> dict[str, int]:
        """What each attribute holds at the end that the graph writes."""
        if not self._states.state:
            return {}
        return {str(node.target): self.read(node) for node in self.nodes if node.op == "get_attr" and self._states.now(node)}

    def _plain(self, said: Any) -> int:
        return said if type(said) is int else self.table.number((LIST, said))

    def _number(self, key: Key, node: fx.Node) -> int:
        number = self.table.number(key)
        self.node_of.setdefault(number, node)
        return number

    def _learn(self, number: int, value: Any) -> None:
        """A fake value of the expression ``number``; of one that an earlier graph has, only that graph is believed."""
        if number >= self._first:
            self.table.facts.setdefault(number, value)

    def _into_launches(self) -> tuple[set[fx.Node], set[fx.Node]]:
        """Nodes through which data moves into launches, and new buffers that data is moved into."""
        packed: set[fx.Node] = set()
        storages: set[fx.Node] = set()
        buffers: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node.op != "call_function":
                continue
            operator = self._operator(node)
            if operator.moves:
                targets = [base(target) for target in written_arguments(node)] if operator.effects.writes else []
                buffers.update(target for target in targets if target.op == "call_function" and self._operator(target).is_new)
                leads = node in packed or any(target in storages for target in targets)
            else:
                leads = operator.launches in _FOLLOWED
            if leads:
                packed.update(inputs_of(node))
                storages.update(map(base, inputs_of(node)))
        return packed, buffers

    def _operator(self, node: fx.Node) -> Operator:
        found = self._operators.get(id(node.target))
        if found is None:
            found = self._operators[id(node.target)] = ops.read(node)
        return found

    def _visit(self, node: fx.Node) -> None:
        if node.op == "call_function":
            operator = self._operator(node)
            if operator.is_plain:
                self._compute(node, operator)
            elif operator.launches is not None:
                self._launch(node, operator)
            elif operator.same:
                self._as_it_is(node)
            elif not (operator.moves and self._move(node, operator)):
                self._compute(node, operator)
        elif node.op == "placeholder":
            self._begin(node, ("input", Const("input", next(self._inputs))))
        elif node.op == "get_attr":
            self._begin(node, ("attribute", Const("bytes", digest_of(self.root, str(node.target)))))
        elif node.op != "output":
            self._compute(node, self._operator(node))

    def _begin(self, node: fx.Node, key: Key) -> None:
        self._made[node] = number = self._number(key, node)
        self._learn(number, node.meta.get("val"))

    def _as_it_is(self, node: fx.Node) -> None:
        source = next(iter(inputs_of(node)))
        if source in self._values:
            self._values[node] = self._values[source]
        if source in self._brought:
            self._brought.add(node)
        else:
            self._made[node] = self._made[source]
            if source in self._items:
                self._items[node] = self._items[source]

    # What computes.

    def _compute(self, node: fx.Node, operator: Operator) -> None:
        if operator.is_new and node in self._buffers:
            self._values[node] = execute(node, map_arg(node.args, self._known), dict(node.kwargs), self._memory)
            self._brought.add(node)
            return
        if node.target is getitem and (items := self._items.get(node.args[0])) is not None:  # type: ignore[call-overload]
            self._item(node, items)
            return
        if operator.cast is not None and (cast := self._cast(node, operator.cast)) is not None:
            self._made[node] = number = self._number(cast, node)
            self._learn(number, node.meta.get("val"))
            return
        said = self._arguments(node, operator)
        if operator.effects.random or operator.effects.barrier:
            said = (*said, ("drawn", self.draws))
        if operator.effects.chained or operator.effects.barrier:
            said = (*said, ("after", self.world))
        parts = _members(said) if operator.by_member else None
        if parts is not None:
            numbers = tuple(self._number((operator.label, *part), node) for part in parts)
            self._items[node], number = numbers, self._number((LIST, *numbers), node)
        else:
            numbers = ()
            number = self._number((operator.label, *said), node)
        self._made[node] = number
        self._learn(number, node.meta.get("val"))
        if operator.left:
            self.table.left.setdefault(number, operator.left)
        if not operator.moves and node.target is not getitem:
            self.computed.update(numbers or (number,))
        if operator.is_plain:
            return
        if operator.effects.random or operator.effects.barrier:
            self.draws = self._number(("drawn", number), node)
        if operator.effects.chained or operator.effects.barrier:
            self.world = self._number(("done", number), node)
        if operator.effects.writes or operator.effects.everything:
            self._write(node, operator, number, numbers)

    def _item(self, node: fx.Node, items: tuple[int, ...]) -> None:
        """What ``node`` takes of what was computed member by member, of a list of lists a list of what each member gave."""
        source: Any = node.args[0]
        index: Any = node.args[1]
        if source.op == "call_function" and self._operator(source).nested:
            parts = self._items[node] = tuple(self._number(("item", one, const(index)), node) for one in items)
            self._made[node] = self._number((LIST, *parts), node)
        else:
            self._made[node] = items[index]
        self._learn(self._made[node], node.meta.get("val"))

    def _cast(self, node: fx.Node, dtype_of: Callable[[fx.Node], Any]) -> Key | None:
        """The expression of a cast, as it is told of one that is folded into a pack."""
        dtype, source = dtype_of(node), self.read(node.args[0])  # type: ignore[arg-type]
        fact = self.table.facts.get(source)
        if dtype is None or not isinstance(fact, torch.Tensor):
            return None
        return ("cast", source, const(fact.dtype), const(dtype))

    def _arguments(self, node: fx.Node, operator: Operator) -> Key:
        """All arguments in the order of the schema, those left out as their defaults."""
        args, kwargs = node.args, node.kwargs
        if operator.view and self._states.changing and args and isinstance(args[0], fx.Node):
            # A view has no moment of its own: what it shows is what is there when somebody looks.
            first: Any = self._bytes(args[0]) if args[0] in self._brought else self._made[args[0]]
            said = [first, *map(self._said, args[1:])]
        else:
            said = [self._said(value) for value in args]
        defaults = operator.defaults
        if len(said) < len(defaults):
            for name, default in defaults[len(said) :]:
                said.append(self._said(kwargs[name]) if name in kwargs else default)
        elif kwargs and not defaults:
            said += [(name, self._said(value)) for name, value in sorted(kwargs.items())]
        return tuple(said)

    def _said(self, value: Any) -> Any:
        kind = type(value)
        if kind is fx.Node:
            return self.read(value)
        if isinstance(value, (list, tuple)):
            return (LIST, *map(self._said, value))
        if kind is dict:
            return ("{", *((str(key), self._said(one)) for key, one in sorted(value.items())))
        if kind is slice:
            return ("slice", self._said(value.start), self._said(value.stop), self._said(value.step))
        return const(value)

    def _write(self, node: fx.Node, operator: Operator, number: int, numbers: tuple[int, ...]) -> None:
        """What ``node`` computed is what its written arguments hold from now on."""
        for index, target in enumerate(written(node)):
            said = numbers[index % len(numbers)] if numbers else number
            out = self._number(("written", said, const(index // len(numbers) if numbers else index)), node)
            if target in self._brought:
                for tensor in _tensors(self._values[target]):
                    self._memory.write(tensor, contents.run(out, tensor.nbytes, precision_of(tensor.dtype), tensor.dtype))
            else:
                self._changed(target, out, node)
        returned = [target for target in written(node) if target in self._brought]
        if returned and returns_written(node):
            self._values[node] = self._values[returned[0]]
            self._brought.add(node)
        elif returns_written(node):
            self._made[node] = self._made[written(node)[0]]

    def _changed(self, target: fx.Node, out: int, node: fx.Node) -> None:
        for home in self._states.of(target):
            before = self._states.state.get(home, 0)
            self._states.state[home] = self._number(("write", before, self._made[target], out), node)
            for one in self._roots.get(home, ()):
                for tensor in _tensors(self._values[one]):
                    self._hold(tensor, self.read(one))

    # What moves data from launches on, and into them.

    def _move(self, node: fx.Node, operator: Operator) -> bool:
        """Follow ``node``, if it moves what is followed or what is launched; whether its value is told by its bytes."""
        sources = inputs_of(node)
        brings = any(source in self._brought for source in sources)
        if node.target is getitem:
            container: Any = node.args[0]
            if container not in self._values:
                return False
        elif not brings and node not in self._packed:
            return False
        if operator.effects.writes and not all(target in self._brought for target in written(node)):
            return False  # memory of the model's own is written, which is told by its states
        try:
            args, kwargs = map_arg(node.args, self._known), map_arg(node.kwargs, self._known)
            self._values[node] = execute(node, args, kwargs, self._memory)
        except NotFollowedError:
            return False
        if brings:
            self._brought.add(node)
        elif not operator.view and self._states.changing:
            self._root(node)
        return brings

    def _known(self, node: fx.Node) -> Any:
        """The meta tensor of ``node``; what only was computed so far is followed from here."""
        if node not in self._values:
            value = self.table.facts.get(self._made[node])
            self._values[node] = self._new(node, value)
            if self._states.changing:
                self._root(node)
        return self._values[node]

    def _root(self, node: fx.Node) -> None:
        """Whoever writes where ``node`` lives changes what is followed from it."""
        keys = {storage_key(tensor) for tensor in _tensors(self._values[node])}
        if not keys <= self._rooted:
            self._rooted |= keys
            for home in self._states.of(node):
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
        self._memory.define(new, ())
        self._hold(new, self.read(node))
        return new

    def _hold(self, tensor: torch.Tensor, number: int) -> None:
        self._memory.define(tensor, contents.run(number, tensor.nbytes, contents.EXACT, tensor.dtype))

    def _bytes(self, node: fx.Node) -> int:
        """The expression of what is told by its bytes."""
        value = self._values[node]
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                return self._number((LIST, *(self._of_tensor(one, node) for one in value)), node)
            return self._number(("value", const(value)), node)
        version = self._memory.version(value)
        known = self._known_bytes.get(node)
        if known is None or known[0] != version:
            known = self._known_bytes[node] = version, self._of_tensor(value, node)
        return known[1]

    def _of_tensor(self, tensor: torch.Tensor, node: fx.Node) -> int:
        found = expression(self.table, tensor, self._memory)
        if type(found) is int:
            self.node_of.setdefault(found, node)
            return found
        number = self._number(found, node)  # type: ignore[arg-type]
        self._learn(number, tensor)
        return number

    # Launches.

    def _launch(self, node: fx.Node, operator: Operator) -> None:
        kind = operator.launches
        group = str(collectives.argument(node, "group_name") or "")
        members = self.members.get(group, ())
        given: Any = collectives.sent_by(node)
        listed = isinstance(given, (list, tuple))
        nodes = [one for one in (given if listed else [given]) if isinstance(one, fx.Node)]
        size = collectives.argument(node, "group_size")
        odd = isinstance(size, int) and size != len(members)
        if kind not in _FOLLOWED or not members or not nodes or odd or operator.effects.chained:
            self._other(node, operator, group, members)
            return
        op = str(collectives.argument(node, "reduce_op") or "")
        out = node.kwargs.get("out")
        buffers: list[Any] = [out] if isinstance(out, fx.Node) else nodes if operator.effects.writes else []
        results = []
        for index, one in enumerate(nodes):
            tensor = self._known(one)
            runs = self._memory.read(tensor)
            self._note(node, members, kind, op, tensor, runs)
            shape, brought = self._over(kind, op, members, tensor, runs)
            if index < len(buffers):
                results.append(self._filled(node, buffers[index], brought))
            else:
                results.append(self._memory.allocate(torch.empty(shape, dtype=tensor.dtype, device="meta"), brought))
        self._values[node] = results if listed else results[0]
        self._brought.add(node)

    def _over(
        self, kind: str, op: str, members: Ranks, tensor: torch.Tensor, runs: contents.Runs
    ) -> tuple[list[int], contents.Runs]:
        """Shape and content of what a launch brings."""
        shape, count = list(tensor.shape), len(members)
        if kind == "all_reduce":
            return shape, reduced(self.table, runs, op, tensor.dtype, members)
        if kind == "all_gather":
            whole = [shape[0] * count, *shape[1:]] if shape else [count]
            return whole, gathered(self.table, runs, tensor.nbytes, members, self._ranks_of)
        if shape[0] % count:
            raise ValueError(f"{shape[0]} rows cannot be scattered to {count} ranks")
        own = [shape[0] // count, *shape[1:]]
        return own, scattered(self.table, runs, tensor.nbytes // count, op, tensor.dtype, members)

    def _filled(self, node: fx.Node, buffer: fx.Node, runs: contents.Runs) -> torch.Tensor:
        """``buffer``, which the launch ``node`` fills."""
        tensor: torch.Tensor = self._known(buffer)
        self._memory.write(tensor, runs)
        if buffer not in self._brought:
            self._changed(buffer, self._of_tensor(tensor, node), node)
            self._memory.write(tensor, runs)
        return tensor

    def _note(self, node: fx.Node, members: Ranks, kind: str, op: str, tensor: torch.Tensor, runs: contents.Runs) -> None:
        how = (Const("launch", f"{kind} {op}"), Const("tensor", f"{tensor.dtype} {tuple(tensor.shape)}"))
        sources = tuple(spans(runs))
        self.sent.append((members, self.table.number(("sent", *how, *sources))))

    def _other(self, node: fx.Node, operator: Operator, group: str, members: Ranks) -> None:
        """A launch that is told as a whole: by its arguments, its group by its members."""
        said = tuple(among(members) if members and one == const(group) else one for one in self._arguments(node, operator))
        if operator.effects.chained:
            said = (*said, ("after", self.world))
        number = self._number((operator.label, *said), node)
        self._made[node] = number
        self.sent.append((members, number))
        self._learn(number, node.meta.get("val"))
        if operator.effects.chained:
            self.world = self._number(("done", number), node)
        if operator.effects.writes or operator.effects.everything:
            self._write(node, operator, number, ())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for item in value for one in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _members(said: Key) -> list[Key] | None:
    """The arguments of each member, if those that are lists have one for each; None if there is nothing to part."""
    counts = {len(one) - 1 for one in said if type(one) is tuple and one and one[0] == LIST and len(one) > 1}
    if len(counts) != 1:
        return None
    return [
        tuple(one[index + 1] if type(one) is tuple and one and one[0] == LIST and len(one) > 1 else one for one in said)
        for index in range(counts.pop())
    ]
