"""The check ``same``: each distinct graph that a rank runs, compared with one that no pass has seen; differences as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.checks.bitwise.crossing import crosses
from pytest_fxbucket.checks.context import looked_at
from pytest_fxbucket.checks.verdict import Verdict, capped, failed, passed, skipped
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.groups import members_of_groups
from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.pipeline.composed import PART
from pytest_fxbucket.same.step import GraphComparison, GraphSide, Walked, compared, crosswise
from pytest_fxbucket.same.table import LIST, Const, ExpressionTable, Key, SourceBytes
from pytest_fxbucket.step.mesh import fake_mesh
from pytest_fxbucket.words import counted, some

if TYPE_CHECKING:
    from torch import fx, nn

    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.same.exact import Ranks
    from pytest_fxbucket.same.step import ExpressionDifference, WastedCompute
    from pytest_fxbucket.step.roles import Phase, StepGraph

_SHOWN = 12


class SameProgram:
    """The step before and after the pass and its transformations, on the ranks of the real mesh."""

    def __init__(self, world: PlanOnMesh) -> None:
        self.world, self.table = world, ExpressionTable()
        self._walked: Walked = {}

    def verdict(self) -> Verdict:
        """Compare every graph of the step. Raises what capture and passes raise."""
        lines = dict[str, None]()
        found: dict[int, dict[Phase, GraphComparison]] = {}
        for ranks in (sets := self._sets()):
            found[ranks[0]] = {phase: self._compared(phase, ranks[0]) for phase in self._before(ranks[0]).graphs}
            given = [self._since_given(phase, ranks[0]) for phase in found[ranks[0]]] if self._has_given else []
            lines.update(dict.fromkeys(line for one in (*found[ranks[0]].values(), *given) for line in self._lines(one)))
        lines.update(dict.fromkeys(self._pairings(found, sets)))
        if (stages := self._together()) is not None:
            found[0]["together"] = stages
            lines.update(dict.fromkeys(self._lines(stages)))
        if lines:
            summary = f"{counted(len(lines), 'place')} where the step is not shown to be the same program"
            return failed("same", summary, capped(list(lines), _SHOWN))
        return self._green(found)

    def _green(self, found: Mapping[int, Mapping[Phase, GraphComparison]]) -> Verdict:
        world = self.world
        # The summary counts each phase once, on the first rank that has it: reversed, the first one is the last to be put in.
        first = list({phase: one for graphs in reversed([*found.values()]) for phase, one in graphs.items()}.values())
        outputs, written = sum(one.outputs for one in first), sum(one.written for one in first)
        left = {name: why for one in first for name, why in one.left.items()}
        if not outputs:
            return skipped("same", f"nothing can be shown, which is left to bitwise: {'; '.join(dict.fromkeys(left.values()))}")
        total = outputs + sum(name in left for one in first for name in one.left)
        what = f"{outputs} of {total} outputs" if left else f"{outputs} outputs"
        what += f" and {written} written inputs" if written else ""
        notes = "".join(f"; {note}" for note in self._notes(left, first))
        return passed("same", f"{what} stand for the same expressions on {looked_at(world)}{notes}")

    def _notes(self, left: Mapping[str, str], found: Sequence[GraphComparison]) -> Iterator[str]:
        world = self.world
        for why in dict.fromkeys(left.values()):
            names = [name for name, reason in left.items() if reason == why]
            yield f"left to bitwise: {some(names)}, since {why}"
        if world.captured.rounding:
            yield f"compared with the step behind {world.captured.rounding[-1]}"
        if crosses(world):
            yield f"left to bitwise: what {world.versions(0).after[-1].name} moves to the next iteration"
        if world.plan.pipeline is not None:
            yield "a microbatch through all stages stands for that of the whole model; left to bitwise: their sum"
        if added := [name for one in found for name in one.added]:
            how = f"compared from behind {self.world.captured.stages.before[-1].name} on" if self._has_given else "not compared"
            yield f"{how}: {some(list(dict.fromkeys(added)))}, which only one of the graphs has"
        yield from (*world.captured.hidden_forwards, *world.hidden_forwards)

    def _sets(self) -> list[list[int]]:
        """Ranks that are looked at, in sets whose graphs need to be compared only once."""
        # Digests have names of groups, not their ranks.
        found: dict[object, list[int]] = {}
        for rank in self.world.ranks():
            graphs = (*self.world.passed(rank).items(), *self.world.final(rank).items())
            for _, one in graphs:
                one.refuse_unreadable()
            digests = tuple((phase, one.digest) for phase, one in graphs)
            compared_graphs = [module.graph for module in self._before(rank).graphs.values()]
            compared_graphs += [side.graph for side in self._finals(rank).values()]
            groups = tuple(sorted(self._members(rank, compared_graphs).items()))
            found.setdefault((digests, groups, id(self.world.step(rank))), []).append(rank)
        return list(found.values())

    def _before(self, rank: int) -> StepGraph:
        """The step that the graphs are compared with; for pipeline stages the same stages before the pass."""
        return self.world.versions(rank).step if self.world.plan.pipeline is not None else self.world.reference(rank)

    def _members(self, rank: int, graphs: Sequence[fx.Graph]) -> dict[str, Ranks]:
        """The ranks of each group that ``graphs`` name, as rank 0 sees its own: expressions of all ranks are compared."""
        mesh = self.world.mesh
        with fake_mesh(mesh, rank):
            return {name: mesh.seen_by(0, ranks) for graph in graphs for name, ranks in members_of_groups(graph).items()}

    def _finals(self, rank: int) -> dict[Phase, GraphSide]:
        """The graphs that are compared with those before: the final ones or, if work crosses iterations, the last before that.

        Work that is moved to the next call changes what one call returns, so such a graph is not comparable.
        """
        world, versions = self.world, self.world.versions(rank)
        if not crosses(world):
            return {
                p: _side(one.bucketed.graph, one.bucketed.root, versions.final_step, p) for p, one in versions.final.items()
            }
        if len(versions.after) > 1:
            step = versions.after[-2].step
            return {phase: _side(module.graph, module, step, phase) for phase, module in step.graphs.items()}
        return {p: _side(one.bucketed.graph, one.bucketed.root, versions.step, p) for p, one in versions.passed.items()}

    def _compared(self, phase: Phase, rank: int) -> GraphComparison:
        return self._graphs_compared(self._before(rank), self._finals(rank)[phase], phase, rank)

    @property
    def _has_given(self) -> bool:
        """Whether the pass was given another step than the captured one, for example one with state of its own."""
        return bool(self.world.captured.stages.before) and self.world.plan.pipeline is None

    def _since_given(self, phase: Phase, rank: int) -> GraphComparison:
        """What the pass made, compared with the step that it was given, which may have more than the captured one."""
        versions = self.world.versions(rank)
        one = versions.passed[phase].bucketed
        return self._graphs_compared(versions.step, _side(one.graph, one.root, versions.step, phase), phase, rank)

    def _graphs_compared(self, step: StepGraph, after: GraphSide, phase: Phase, rank: int) -> GraphComparison:
        module = step.graphs[phase]
        before = _side(module.graph, module, step, phase)
        return self._sides_compared(before, after, rank, f"as rank {rank} of {self.world.size}")

    def _sides_compared(self, before: GraphSide, after: GraphSide, rank: int, where: str) -> GraphComparison:
        before, after = (replace(side, members=self._members(rank, [side.graph])) for side in (before, after))
        self.world.say(f"comparing expressions of {len(after.graph.nodes)} nodes {where}")
        return compared(self.table, before, after, self._walked)

    def _together(self) -> GraphComparison | None:
        """All pipeline stages together, compared with the microbatch's graph that they were cut from; None without stages.

        Raises PassError if the stages do not fit together, which audit finds, too.
        """
        world = self.world
        if world.staged is None or world.together is None:
            return None
        if world.together.graph_module is None:
            raise PassError(f"the stages do not fit together: {world.together.problems[0]}")
        microbatch, outputs = world.staged.microbatch, world.together.outputs
        whole, parted = world.together.whole, world.together.graph_module
        assert whole is not None
        before, after = (GraphSide(module.graph, module, microbatch.inputs, outputs, {}) for module in (whole, parted))
        return self._sides_compared(before, after, 0, f"in {world.staged.pipelined.stages} stages")

    def _lines(self, found: GraphComparison) -> Iterator[str]:
        yield from (difference_text(self.table, one) for one in found.differences)
        yield from (waste_text(one) for one in found.waste)

    def _pairings(self, found: Mapping[int, Mapping[Phase, GraphComparison]], sets: Sequence[Sequence[int]]) -> Iterator[str]:
        """A sentence for each phase in which ranks launch what does not belong together, though each launches all its own."""
        # Each rank alone may be right and still pair its launch with another one of its peers. Ranks of one set launch alike.
        if len(sets) == 1:
            return
        for phase in dict.fromkeys(phase for one in found.values() for phase in one):
            launches = [(ranks, found[ranks[0]][phase].sent) for ranks in sets if phase in found[ranks[0]]]
            before, after = (self._on_each({tuple(ranks): sent[side] for ranks, sent in launches}) for side in (0, 1))
            # Of a group on which the ranks already send different things before the pass nothing can be said.
            unknown = crosswise(before)
            if odd := [(group, there) for group, there in crosswise(after).items() if group not in unknown]:
                group, (place, numbers) = odd[0]
                first, *others = sorted(numbers)
                other = next(rank for rank in others if numbers[rank] != numbers[first])
                a, b = (expression_text(self.table, numbers[rank]) for rank in (first, other))
                yield (
                    f"launch {place + 1} on ranks {','.join(map(str, group))} does not belong together: "
                    f"rank {first} sends {a}, rank {other} {b}"
                )

    def _on_each(self, sent: Mapping[tuple[int, ...], Sequence[tuple[Ranks, int]]]) -> dict[int, list[tuple[Ranks, int]]]:
        """By rank what each of the sets of ranks in ``sent`` sends, on groups of the rank's own."""
        found = {}
        for ranks, launches in sent.items():
            groups = dict.fromkeys(group for group, _ in launches)
            for rank in ranks:
                own = {group: self.world.mesh.seen_by(rank, group) for group in groups}
                found[rank] = [(own[group], number) for group, number in launches]
        return found


def _side(graph: fx.Graph, root: nn.Module, step: StepGraph, phase: Phase) -> GraphSide:
    # The ranks of its groups differ from rank to rank, and are put in when a rank is looked at.
    return GraphSide(without_kept_order(graph), root, step.inputs[phase], step.outputs[phase], {})


# Expressions, differences and waste in words.

_DEPTH = 3
_MOST = 240
"""Characters of an expression that are shown at most."""
_NAMES = 3


def expression_text(table: ExpressionTable, number: int, depth: int = _DEPTH) -> str:
    """The expression ``number`` as text, to a limited depth: ``mul(w1 gathered over 0-3, 2.0)``."""
    key = table.keys[number]
    kind = str(key[0])
    if depth == 0 and kind not in ("input", "undefined", "zeros"):
        return "..."
    if kind in _FORMS:
        return _FORMS[kind](table, key, depth)
    shown = [_part(table, part, depth - 1) for part in key[1:]]
    if kind == LIST:
        return "[" + ", ".join(shown) + "]"
    return f"{kind.removeprefix('aten::')}({', '.join(one for one in shown if one != 'None')})"


def _reduction(table: ExpressionTable, key: Key, depth: int) -> str:
    sources = dict.fromkeys(one for one, *_ in key[1]) if key[0] == "scattered" else (key[1],)
    of = ", ".join(expression_text(table, one, depth) for one in list(sources)[:2])
    # A constant's text is its repr, so a string is in quotes.
    op, dtype, ranks = key[-3].text.strip("'"), _short(key[-2].text), _span(key[-1].text)
    return f"{op} in {dtype} over ranks {ranks} of {of}{', scattered' if key[0] == 'scattered' else ''}"


def _part(table: ExpressionTable, part: Any, depth: int) -> str:
    if type(part) is int:
        return expression_text(table, part, max(depth, 0))
    if type(part) is Const:
        return _short(part.text)
    if type(part) is tuple:
        return "[" + ", ".join(_part(table, one, depth) for one in part if one != LIST) + "]"
    return "" if type(part) is SourceBytes else str(part)


def _bytes(table: ExpressionTable, key: tuple[Any, ...], depth: int) -> str:
    """Sources of the bytes and, unless they are one source from its beginning on, which bytes of them in which order."""
    sources = list(dict.fromkeys(source for source, _ in key[2]))
    shown = ", ".join(expression_text(table, one, depth) for one in sources[:_NAMES])
    more = f" and {len(sources) - _NAMES} more" if len(sources) > _NAMES else ""
    places = [at for _, at in key[2]]
    plain = len(places) == 1 and (places[0].start, max(places[0].rank, 0)) == (0, 0)
    runs = "" if plain else "; bytes " + ", ".join(_run(at) for at in places[:_NAMES]) + (", ..." if places[_NAMES:] else "")
    return f"{shown}{more} ({key[1].text}{runs})"


def _run(at: SourceBytes) -> str:
    rank = "" if at.rank < 0 else f" of rank {at.rank}" if at.times == 1 else f" of ranks {at.rank}-{at.rank + at.times - 1}"
    return f"{at.start} to {at.start + at.length}{rank}"


def _short(text: str) -> str:
    return text.removeprefix("torch.")


def _span(text: str) -> str:
    ranks = text.split(",")
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 2 else text


def cut(text: str) -> str:
    """``text``, cut to the length that is shown."""
    return text if len(text) <= _MOST else text[: _MOST - 4] + " ..."


def node_text(node: fx.Node | None) -> str:
    """A node of the graph after the pass, as text, with its module."""
    if node is None:
        return "an output"
    module = module_of(node)
    part = f", {node.meta[PART]}" if PART in node.meta else ""
    return f"{node.name} ({node.target})" + (f" in {module}" if module else "") + part


def difference_text(table: ExpressionTable, one: ExpressionDifference) -> str:
    """A sentence about a difference, with both expressions."""
    names = some(one.names, _NAMES)
    before, after = (cut(expression_text(table, number)) for number in (one.before, one.after))
    return f"{names}: first differs at {node_text(one.node)}, which gives {after}; before the pass it was {before}"


def waste_text(one: WastedCompute) -> str:
    """A sentence about what is computed in vain."""
    before, after = one.times
    if before == 0:
        return f"waste: {node_text(one.node)} computes what nobody reads and what was not computed before the pass"
    return (
        f"waste: what {node_text(one.node)} computes is computed {after} times, expected {before} as before the pass; "
        "the values are the same"
    )


_FORMS: dict[str, Callable[[ExpressionTable, Key, int], str]] = {
    "undefined": lambda table, key, depth: "nothing that was written",
    "zeros": lambda table, key, depth: "zeros",
    "start": lambda table, key, depth: "the beginning",
    "input": lambda table, key, depth: str(key[1].text).rpartition(" ")[0],  # without the count among equal names
    "attribute": lambda table, key, depth: f"a constant {key[1].text[:8]}",
    "cast": lambda table, key, depth: f"{_part(table, key[1], depth)} as {_short(key[3].text)}",
    "gathered": lambda table, key, depth: f"{_part(table, key[1], depth)} gathered over ranks {_span(key[2].text)}",
    "bytes": lambda table, key, depth: _bytes(table, key, depth),
    "scattered": _reduction,
    "reduced": _reduction,
    "seen": lambda table, key, depth: (
        f"{_part(table, key[1], depth)} as left by {_part(table, next(n for n in key[2] if n), depth)}"
    ),
    "write": lambda table, key, depth: _part(table, key[3], depth),
    **dict.fromkeys(("written", "drawn", "done", "after"), lambda table, key, depth: _part(table, key[1], depth)),
    "_operator.getitem": lambda table, key, depth: f"{_part(table, key[1], depth)}[{_part(table, key[2], depth)}]",
}
"""By the first item of an expression: how it is shown, if not as a call."""


def run(context: Context) -> Verdict:
    """The check ``same``. Raises what capture and passes raise."""
    return SameProgram(context.world).verdict()
