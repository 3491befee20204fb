"""What a graph does with its parameters: every launch with its members in byte order, who reads them, and when.

Derived from the GraphModule alone (:mod:`pytest_fxbucket.graph.follow`) and the roles of its inputs and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.graph import collectives, contents
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member, reads_of_written
from pytest_fxbucket.graph.compute import computes, direct_reads, multiplies
from pytest_fxbucket.graph.follow import FollowedValues, SentLaunch, Use, follow
from pytest_fxbucket.graph.gradients import Gradients, begun_in, contributions, named_in
from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.graph.order import needs_of, order_of, why_unmergeable
from pytest_fxbucket.graph.sending import SentPiece
from pytest_fxbucket.graph.update_provenance import updates_of
from pytest_fxbucket.graph.updates import of_call_before, update_nodes
from pytest_fxbucket.graph.walks import ancestors, made_of, reached, writers_in
from pytest_fxbucket.process import collector
from pytest_fxbucket.step.roles import Direction

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.roles import Value

__all__ = ["Bucket", "Direction", "GraphAnalysis", "Member", "read_given", "read_graph"]


def read_graph(
    graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value], before: GraphAnalysis | None = None
) -> GraphAnalysis:
    """Read a joint graph (or one of its phases) whose inputs and outputs have the given roles, in graph order.

    ``before`` is the reading of the graph that a pass made it of.
    """
    with collector.paused():
        return _Reader(graph, inputs, outputs, before.begun if before is not None else ()).reading()


def read_given(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> GraphAnalysis:
    """Like :func:`read_graph`, for a graph that no pass has changed yet: gradients may begin at nodes that only move data.

    There the model assembles a gradient before it is sent (see the end of :mod:`pytest_fxbucket.graph.gradients`).
    """
    with collector.paused():
        return _Reader(graph, inputs, outputs, None).reading()


class _Reader:
    # All is read here, in the order in which facts need each other: where bytes come from, which nodes are forward's and the
    # optimizer's, which gradients the reductions bring, then who reads what. ``reading`` puts it together.
    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value], begun: Collection[str] | None
    ) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.output = graph.output_node()
        self.late, new = of_call_before(graph, inputs, outputs)
        self.begun = named_in(graph, begun or ())
        self.found: FollowedValues = follow(graph, {*new, *self.begun})
        # Only a walk tells which gradients cannot be followed from where they were computed; a second one begins them anew.
        if begun is None and (own := begun_in(self.found)):
            self.begun = own
            self.found = follow(graph, {*new, *own})
        self.early = _made_early(graph, outputs, new)
        self.forward = _forward_nodes(graph, inputs, outputs, new) | self.early
        self.update = update_nodes(graph, inputs, outputs)
        self.graph, self.inputs, self.outputs = graph, inputs, outputs
        self.forward_positions = {self.position[node] for node in self.forward}
        self.forward_order = sorted(self.position[node] for node in self.forward if computes(node))
        placeholders = [node for node in self.position if node.op == "placeholder"]
        self.role = {node: value.role for node, value in zip(placeholders, inputs, strict=True)}
        self.parameter = {n: v.fqn for n, v in zip(placeholders, inputs, strict=True) if v.role == "param"}
        # An updated parameter of the call before is gathered and read like an input of this one.
        self.parameter |= {node: value.fqn for node, value in new.items() if value.role == "param"}
        self.problems = list(self.found.problems)
        self.computes: set[tuple[int, Direction, str]] = set()
        self.seen_as: set[tuple[str, str]] = set()
        self.gathers: Counter[tuple[str, Direction, str, int]] = Counter()
        """All-gathers of a parameter so far, by FQN, direction, process group, and over how many groups it was gathered."""
        self.precision: dict[tuple[fx.Node, int], int] = {}
        self.uses: dict[fx.Node, dict[int, list[int]]] = {node: {} for node in self.found.sent}
        """Positions of what reads a source, by the launch that brought it and by its number."""
        self.order = order_of(graph)
        self.needs = needs_of(self.order, list(self.found.sent))
        self.gradients = Gradients(self.found, self.output, outputs, self.role, inputs)
        self.names = self.gradients.names
        self.problems += self.gradients.problems
        for use in self.found.uses:
            self._note(use)
        for node, fqn in direct_reads(self.parameter):
            self.computes.add((self.position[node], self._direction(node), fqn))
        for node, sent in self.found.sent.items():
            for piece in sent.content:
                self._note_sent(node, piece)

    def reading(self) -> GraphAnalysis:
        buckets = tuple(self._bucket(node, sent) for node, sent in self.found.sent.items())
        return GraphAnalysis(
            buckets=buckets,
            computes=tuple(sorted(self.computes)),
            problems=tuple(self.problems),
            last=self.position[self.output],
            seen_as=tuple(sorted(self.seen_as)),
            products=tuple(self._products()),
            names=tuple(node.name for node in self.position if computes(node) and node not in self.gradients.behind),
            updating=frozenset(self.position[node] for node in self.update),
            updates=tuple(updates_of(self.graph, self.update, self.inputs, self.outputs, self._given_to_updates())),
            overwritten=tuple(reads_of_written(self.order, self.inputs, buckets)),
            order=self.order,
            late=frozenset(self.position[node] for node in self.late),
            begun=frozenset(node.name for node in self.begun),
        )

    def _given_to_updates(self) -> dict[tuple[fx.Node, fx.Node], list[str]]:
        """By (reader, value) the gradients that a node of the optimizer finds in the result of a reduction."""
        return {
            (use.reader, use.value): [
                self.names[n] for n in dict.fromkeys(one.source for one in use.content) if n in self.names
            ]
            for use in self.found.uses
            if use.reader in self.update
        }

    def _products(self) -> Iterator[tuple[int, Direction, str]]:
        """Products that read no parameter, each with the parameter of the last compute that leads to it and reads one."""
        # Of several parameters that one node reads the first by name is taken: reversed, it is the last to be put in.
        noted = {where: fqn for where, _, fqn in sorted(self.computes, reverse=True)}
        nearest: dict[fx.Node, int] = {}
        for node, where in self.position.items():
            if where in noted:
                nearest[node] = where
                continue
            nearest[node] = max((nearest[source] for source in node.all_input_nodes), default=-1)
            if nearest[node] >= 0 and multiplies(node):
                yield where, self._direction(node), noted[nearest[node]]

    def _direction(self, node: fx.Node) -> Direction:
        if node in self.update:
            return "optimizer"
        return "forward" if node in self.forward else "backward"

    def _note(self, use: Use) -> None:
        """Sort one read value: whole parameter, piece of one, reduced gradient, or jumble."""
        runs = use.content
        # Only a gather gives runs of other ranks; what was reduced or computed here is this rank's own.
        if all(one.rank < 0 for one in runs):
            self._note_reduced(use)
            return
        number = runs[0].source
        source = self.found.sources[number]
        fqn = self.parameter.get(source.node, "") if source is not None else ""
        dtype = contents.dtype_of(runs[0].form) if source is not None else None
        # Runs must be whole elements, unless compute reads the bits as another dtype; that is noted in ``seen_as`` below.
        whole = use.dtype != dtype or contents.whole_elements(runs)
        if source is None or not whole or not contents.ascends(runs, source.numel, source.ranks):
            if self._note_other(use):
                return
            names = [self._source_name(n) for n in dict.fromkeys(one.source for one in runs)]
            self.problems.append(
                f"{use.reader.target} ({use.reader.name}) reads gathered bytes that are no parameter in its order: "
                + ", ".join(names[:4])
            )
            return
        where = self.position[use.reader]
        if source.launch is not None:
            self._note_use(source.launch, number, where, runs)
        if fqn and use.dtype != dtype:
            self.seen_as.add((fqn, f"{dtype} as {use.dtype}".replace("torch.", "")))
        if fqn and use.reader is not self.output:
            self.computes.add((where, self._direction(use.reader), fqn))

    def _note_other(self, use: Use) -> bool:
        """Note the use of gathered bytes that are no parameter's, as norms of gradients, which may be read in any order.

        Returns False, and notes nothing, if some of the bytes are a parameter's.
        """
        sources = {number: self.found.sources[number] for number in {one.source for one in use.content}}
        if any(source is not None and source.node in self.parameter for source in sources.values()):
            return False
        for number, source in sources.items():
            if source is not None and source.launch is not None:
                self._note_use(source.launch, number, self.position[use.reader], use.content)
        return True

    def _note_reduced(self, use: Use) -> None:
        for number in {one.source for one in use.content}:
            source = self.found.sources[number]
            if source is not None and source.launch is not None:
                runs = tuple(one for one in use.content if one.source == number)
                self._note_use(source.launch, number, self.position[use.reader], runs)
                if fqn := self.names.get(number):
                    maker = self.found.table.known(self.gradients.first(number)).node
                    made = contributions(maker, self.position, self.forward_order)
                    # A gradient that was carried in was made by the call before, not at any position of this graph.
                    here = [node for node in made if self.role.get(node) != "carried"]
                    self.computes.update((self.position[n], "forward" if n in self.early else "backward", fqn) for n in here)
                    if use.reader in self.update:
                        self.computes.add((self.position[use.reader], "optimizer", fqn))

    def _note_use(self, launch: fx.Node, number: int, where: int, runs: contents.Runs) -> None:
        self.uses[launch].setdefault(number, []).append(where)
        bits = min(one.precision for one in runs)
        # What one launch brings may be sent by the next one (hybrid sharding): a narrow cast behind the last counts for all.
        source = self.found.sources[number]
        while source is not None and source.launch is not None:
            key = (source.launch, number)
            self.precision[key] = min(self.precision.get(key, contents.EXACT), bits)
            number = source.sent
            source = self.found.sources[number] if number >= 0 else None

    def _note_sent(self, launch: fx.Node, piece: SentPiece) -> None:
        """If ``launch`` sends what an earlier launch brought, note it as a reader of that launch."""
        source = self.found.sources[piece.source]
        before = self.found.sources[source.sent] if source is not None and source.sent >= 0 else None
        if source is not None and before is not None and before.launch is not None:
            self.uses[before.launch].setdefault(source.sent, []).append(self.position[launch])

    def _source_name(self, number: int) -> str:
        source = self.found.sources[number]
        if source is None:
            return "nothing defined" if number == contents.UNDEFINED else "zeros"
        return self.parameter.get(source.node, source.node.name)

    def _idle(self, launch: fx.Node) -> int | None:
        moved = reached(collectives.waits_of(launch), lambda node: (user for user in node.users if moves_data(user)))
        return max((self.position[node] for node in moved if not node.users), default=None)

    def _bucket(self, node: fx.Node, sent: SentLaunch) -> Bucket:
        launch = sent.launch
        members = tuple(self._member(node, sent, piece) for piece in sent.content)
        self._note_problems(node, sent, members)
        uses = sorted(where for places in self.uses[node].values() for where in places)
        waits = sorted(self.position[wait] for wait in collectives.waits_of(node))
        backward = [where for where in uses if where not in self.forward_positions]
        # A gather is told by who reads it, since a pass may launch it anywhere; one that both directions read is forward's.
        if launch.kind == "all_gather" and uses:
            direction: Direction = "forward" if len(backward) < len(uses) else "backward"
        else:
            direction = self._direction(node)
        scale = launch.parts if launch.kind == "all_gather" else 1
        needs = self.needs[node]
        return Bucket(
            kind=launch.kind,
            op=launch.op,
            group=launch.group,
            dtype=sent.dtype,
            numel=sent.numel * scale,
            bytes=sent.bytes * scale,
            parts=launch.parts,
            members=members,
            direction=direction,
            launch=self.position[node],
            wait=waits[0] if waits else None,
            first_use=uses[0] if uses else None,
            backward_use=backward[0] if backward else None,
            node=node.name,
            module=module_of(node),
            waits=tuple(waits),
            idle=self._idle(node) if launch.kind == "all_gather" else None,
            source=source if isinstance(source := collectives.argument(node, "src"), int) else None,
            unmergeable=why_unmergeable(node, self.order),
            blocked=needs.blocked,
            needed=needs.needed,
            round=self._round(sent, direction, members) if launch.kind == "all_gather" else 0,
            level=max((self.gradients.level(piece.source) for piece in sent.content), default=0),
        )

    def _round(self, sent: SentLaunch, direction: Direction, members: Sequence[Member]) -> int:
        """How many gathers of one of ``members`` were launched before ``sent``; the most of any. Ask in order of launch.

        A gather over a second group, of what a first gather brought, belongs to the round of the first: gathers of each depth
        are counted apart.
        """
        depths = (len(self.found.table.known(p.source).ranks) if p.source > contents.ZERO else 0 for p in sent.content)
        keys = {
            (member.fqn, direction, untwinned(sent.launch.group), depth)
            for member, depth in zip(members, depths, strict=True)
            if member.fqn
        }
        earlier = max((self.gathers[key] for key in keys), default=0)
        self.gathers.update(keys)
        return earlier

    def _note_problems(self, node: fx.Node, sent: SentLaunch, members: Sequence[Member]) -> None:
        what = f"{sent.launch.operator} ({node.name})"
        if sent.problem and sent.launch.kind in ("all_gather", "reduce_scatter"):
            self.problems.append(f"{what}: {sent.problem}")
        named = [member.fqn for member in members if member.fqn]
        if sent.symbolic and named:
            self.problems.append(
                f"{what} carries {', '.join(named[:4])} of a symbolic size ({sent.symbolic}), of which nothing can be "
                "promised: trace the step with sizes that are numbers"
            )

    def _member(self, node: fx.Node, sent: SentLaunch, piece: SentPiece) -> Member:
        number, kind, numel = piece.source, sent.launch.kind, piece.length // piece.dtype.itemsize
        source = self.found.sources[number]
        precision = self.precision.get((node, number), contents.EXACT)
        if source is None:
            offset = piece.offset // piece.dtype.itemsize
            self.problems.append(f"{node.name} sends {numel} elements at offset {offset} that nothing defined")
            return Member("", piece.offset, numel, precision, piece.dtype)
        fqn = self.parameter.get(source.node, "") if kind == "all_gather" else self.names.get(number, "")
        # The second of two nested gathers sends several shards of a parameter, but whole ones.
        if kind == "all_gather" and fqn and numel % source.numel:
            self.problems.append(f"{node.name} gathers {numel} of the {source.numel} elements of {fqn}'s shard")
        if kind == "all_gather" and not fqn and (made_of := self._parameters_alone(source.node)):
            self.problems.append(
                f"{node.name} gathers what {source.node.target} ({source.node.name}) made of {', '.join(made_of[:4])}, "
                "an operator that is not followed"
            )
        last = max(self.uses[node].get(number, ()), default=None)
        return Member(fqn, piece.offset, numel, precision, piece.dtype, last)

    def _parameters_alone(self, node: fx.Node) -> list[str]:
        """Parameters that ``node`` is made of, if neither the batch nor anything that was sent goes into it."""
        needed = ancestors([node])
        if any(n in self.found.sent or self.role.get(n) in ("batch", "value") for n in needed):
            return []
        return [fqn for n, fqn in self.parameter.items() if n in needed]


def _forward_nodes(
    graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value], updated_before: Collection[fx.Node]
) -> set[fx.Node]:
    """Nodes that the loss and buffers depend on, up to what was ``updated_before``; without a loss, what autograd did not make.

    A module that is computed again in backward writes its buffers again. That is no forward, though the next microbatch reads
    them.
    """
    if losses := _returned_as("loss", graph, outputs):
        writers, places = writers_in(graph), zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
        written = {one for node, value in places if value.role == "buffer" for one in writers.get(node, ())}
        late = _behind_backward(graph, written)
        again = written & late
        kept = {storage: [one for one in found if one not in again] for storage, found in writers.items()}
        ends = written - late if late else set()
        return made_of([*losses, *ends], kept, {*updated_before, *again})
    # A graph that takes carried inputs and gives no loss only finishes the call before: it has no forward.
    if any(value.role == "carried" for value in inputs) or _is_backward(graph, inputs, outputs):
        return set()
    return {node for node in graph.nodes if not node.meta.get("autograd_backward")}


def _behind_backward(graph: fx.Graph, written: Collection[fx.Node]) -> set[fx.Node]:
    """What autograd made, by the tracer's marks, and all that reads it, but for what reads a buffer that is ``written``."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.meta.get("autograd_backward") or any(one in found and one not in written for one in node.all_input_nodes):
            found.add(node)
    return found


def _is_backward(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> bool:
    """Whether a graph without a loss makes or reduces gradients and its tracer marked no node as made by autograd."""
    gradients = any(value.role == "unreduced" for value in (*inputs, *outputs))
    return gradients and not any(node.meta.get("autograd_backward") for node in graph.nodes)


def _made_early(graph: fx.Graph, outputs: Sequence[Value], updated_before: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes that compute gradients while forward runs (a loss in chunks), by the tracer's marks; none without a loss."""
    if not _returned_as("loss", graph, outputs):
        return set()
    gradients = made_of(_returned_as("grad", graph, outputs), writers_in(graph), updated_before)
    marked = (node for node in gradients if node.meta.get("nn_module_stack") and computes(node))
    return {node for node in marked if direction_of(node) == "forward"}


def _returned_as(role: str, graph: fx.Graph, outputs: Sequence[Value]) -> list[fx.Node]:
    results = zip(returned(graph.output_node()), outputs, strict=True)
    return [node for node, value in results if value.role == role and hasattr(node, "all_input_nodes")]
