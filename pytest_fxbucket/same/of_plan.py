"""Same of one plan: every distinct graph that a rank runs, held against the graph that no pass has seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.mesh import fake_mesh
from pytest_fxbucket.checks.crossing import crosses
from pytest_fxbucket.checks.verdict import Verdict, failed, passed, skipped
from pytest_fxbucket.graph.groups import members_of_groups
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.same.comparing import crosswise
from pytest_fxbucket.same.step import Found, Side, Walked, compared
from pytest_fxbucket.same.table import Table
from pytest_fxbucket.same.told import difference_text, expression_text, waste_text

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Phase, StepGraph
    from pytest_fxbucket.world import World

_SHOWN = 12


class Same:
    """The step before and after the pass and its transformations, on the ranks of the real mesh."""

    def __init__(self, world: World) -> None:
        self.world, self.table = world, Table()
        self._walked: Walked = {}

    def verdict(self) -> Verdict:
        """Compare every graph of the step. Raises what capture and passes raise."""
        world, lines = self.world, dict[str, None]()
        found: dict[int, dict[Phase, Found]] = {}
        for ranks in self._sets():
            found[ranks[0]] = {phase: self._compared(phase, ranks[0]) for phase in world.reference(ranks[0]).graphs}
            lines.update(dict.fromkeys(line for one in found[ranks[0]].values() for line in self._lines(one)))
        lines.update(dict.fromkeys(self._pairings(found)))
        if lines:
            shown = list(lines)[:_SHOWN]
            more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            return failed("same", _count(len(lines)), [*shown, *more])
        return self._green(found)

    def _green(self, found: Mapping[int, Mapping[Phase, Found]]) -> Verdict:
        world, first = self.world, list(found[0].values())
        outputs, written = sum(one.outputs for one in first), sum(one.written for one in first)
        left = {name: why for one in first for name, why in one.left.items()}
        if not outputs:
            return skipped("same", f"nothing can be shown, which is left to bitwise: {'; '.join(dict.fromkeys(left.values()))}")
        ranks = world.ranks()
        where = f"{world.size} ranks" if len(ranks) == world.size else f"{len(ranks)} of {world.size} ranks"
        total = outputs + sum(name in left for one in first for name in one.left)
        what = f"{outputs} of {total} outputs" if left else f"{outputs} outputs"
        what += f" and {written} written inputs" if written else ""
        notes = "".join(f"; {note}" for note in self._notes(left, first))
        return passed("same", f"{what} stand for the same expressions on {where}{notes}")

    def _notes(self, left: Mapping[str, str], found: Sequence[Found]) -> Iterator[str]:
        world = self.world
        for why in dict.fromkeys(left.values()):
            names = [name for name, reason in left.items() if reason == why]
            yield f"left to bitwise: {_some(names)}, since {why}"
        if world.rounding:
            yield f"compared with the step behind {world.rounding[-1]}"
        if crosses(world):
            yield f"left to bitwise: what {world.way(0).after[-1].name} moves to the next iteration"
        if added := [name for one in found for name in one.added]:
            yield f"not compared: {_some(list(dict.fromkeys(added)))}, which only one of the graphs has"
        yield from dict.fromkeys(world.odd)

    def _sets(self) -> list[list[int]]:
        """Ranks that are looked at, by what they run: graphs of one digest differ where groups of one name have other ranks."""
        found: dict[object, list[int]] = {}
        for rank in self.world.ranks():
            digests = tuple(one.digest for one in (*self.world.passed(rank).values(), *self.world.final(rank).values()))
            groups = self._members(rank, [g.graph for g in self.world.reference(rank).graphs.values()] + self._graphs(rank))
            alike = tuple(sorted((name, min(n for n, r in groups.items() if r == ranks)) for name, ranks in groups.items()))
            found.setdefault((digests, alike, id(self.world.step(rank))), []).append(rank)
        return list(found.values())

    def _graphs(self, rank: int) -> list[fx.Graph]:
        return [side.graph for side in self._finals(rank).values()]

    def _members(self, rank: int, graphs: Sequence[fx.Graph]) -> dict[str, tuple[int, ...]]:
        with fake_mesh(self.world.mesh, rank):
            return {name: ranks for graph in graphs for name, ranks in members_of_groups(graph).items()}

    def _finals(self, rank: int) -> dict[Phase, Side]:
        """The graphs that are held against those before; where work crosses iterations those before that."""
        world, way = self.world, self.world.way(rank)
        if not crosses(world):
            return {p: _side(one.bucketed.graph, one.bucketed.root, way.final_step, p) for p, one in way.final.items()}
        if len(way.after) > 1:
            step = way.after[-2].step
            return {phase: _side(module.graph, module, step, phase) for phase, module in step.graphs.items()}
        return {p: _side(one.bucketed.graph, one.bucketed.root, way.step, p) for p, one in way.passed.items()}

    def _compared(self, phase: Phase, rank: int) -> Found:
        step, after = self.world.reference(rank), self._finals(rank)[phase]
        module = step.graphs[phase]
        before = _side(module.graph, module, step, phase)
        before, after = (replace(side, members=self._members(rank, [side.graph])) for side in (before, after))
        self.world.say(f"comparing expressions of {len(after.graph.nodes)} nodes as rank {rank} of {self.world.size}")
        return compared(self.table, before, after, self._walked)

    def _lines(self, found: Found) -> Iterator[str]:
        yield from (difference_text(self.table, one) for one in found.differences)
        yield from (waste_text(one) for one in found.waste)

    def _pairings(self, found: Mapping[int, Mapping[Phase, Found]]) -> Iterator[str]:
        """Where ranks launch what does not belong together, though each of them does all of its own."""
        for phase in found[0]:
            before, after = ({rank: one[phase].sent[side] for rank, one in found.items()} for side in (0, 1))
            if crosswise(before) is None and (odd := crosswise(after)) is not None:
                group, place = odd
                sent = {
                    n: rank
                    for rank, launches in after.items()
                    for n in [n for g, n in launches if g == group][place : place + 1]
                }
                (a, first), (b, other) = list(sent.items())[:2]
                yield (
                    f"launch {place + 1} on ranks {','.join(map(str, group))} does not belong together: rank {first} sends "
                    f"{expression_text(self.table, a)}, rank {other} {expression_text(self.table, b)}"
                )


def _side(graph: fx.Graph, root: object, step: StepGraph, phase: Phase) -> Side:
    return Side(without_kept_order(graph), root, step.inputs[phase], step.outputs[phase], {})  # type: ignore[arg-type]


def _count(count: int) -> str:
    return f"{count} place{'' if count == 1 else 's'} where the step is not shown to be the same program"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
