"""Moves the reduction and the update of entries into the next iteration: set-up, steady and clean-up graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.graph.update_provenance import reductions_of
from pytest_fxbucket.passes.keep_order import AFTER, without_kept_order
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.selectors import ResolvedEntry, entry_by_parameter, resolve
from pytest_fxbucket.step.roles import StepGraph, Transformed
from pytest_fxbucket.transforms.next_iteration.block import NAME, Block, block_of, moved_reductions, refuse_illegal
from pytest_fxbucket.transforms.next_iteration.graphs import CutGraph
from pytest_fxbucket.transforms.next_iteration.steady_graph import place_late
from pytest_fxbucket.transforms.transformation import BUCKET, transformation

__all__ = ["next_iteration"]


@transformation(needs=("roles", "optimizer"), after=(BUCKET,), keeps_collectives=False, crosses_iterations=True)
def next_iteration(step: StepGraph, state: dict[str, torch.Tensor], *, entries: Sequence[Any]) -> StepGraph:
    """``step`` (graph "joint", bucketed) with the reductions and updates of ``entries`` in the next call.

    ``entries`` are selectors as in ``[bucket] plan``. The reductions and updates that move are the block. The result has three
    graphs: "setup" is the step without the block; "steady" first runs the block of the call before (reductions launched at the
    top, waited for and used right before something reads a new parameter or state) and then the rest of its own call; "cleanup"
    runs the block alone, after the last call. Values that go from call to call have the role "carried": gradients that are not
    reduced yet, by the FQN of their parameter, and the learning rates of their own call. New parameters, state and reduced
    gradients of the block are outputs of "steady" and "cleanup", and belong to the call before.

    Raises :class:`PlanError` for entries that are no list or match nothing, :class:`PassError` for an entry that cannot move,
    with the reason; nothing is changed then.
    """
    moved = _resolved(step, entries)
    graph_module = step.graphs.get("joint")
    if graph_module is None or len(step.graphs) != 1:
        raise PassError(f"{NAME}: the step has graphs {', '.join(step.graphs)}; one graph of the whole step is expected")
    graph = graph_module.graph
    if without_kept_order(graph) is not graph:
        raise PassError(
            f"{NAME}: the graph keeps its order by operators of its own ({AFTER}), which would hold back what is to move; use "
            "[overlap] insert_overlap_deps = false"
        )
    # All that may be refused is refused on the joint graph, before anything is made of it.
    everything = reductions_of(graph, step.inputs["joint"], step.outputs["joint"])
    reductions = moved_reductions(everything, step, moved)
    entry_of = entry_by_parameter(moved)
    block = block_of(graph, step.inputs["joint"], step.outputs["joint"], reductions, entry_of)
    refuse_illegal(block, everything)
    # New graphs, of copies of the nodes; only the new steady graph is reordered, so the step's own stays as it is.
    cut = CutGraph(block)
    setup, cleanup, (steady, copies) = cut.setup(), cut.cleanup(), cut.steady()
    levels = {copies[one.launch]: one.level for one in reductions}
    parameters = [node for node, value in block.input_values.items() if value.role == "param"]
    hidden = place_late(steady, [copies[node] for node in block.running], levels, [copies[node] for node in parameters])
    graphs = {"setup": setup, "steady": steady, "cleanup": cleanup}
    inputs, outputs = step.inputs["joint"], tuple(value for _, value in block.results)
    return replace(
        step,
        graphs={phase: uncompiled(graph_module, made) for phase, made in graphs.items()},
        inputs={
            "setup": inputs,
            "steady": (*inputs, *cut.carried),
            "cleanup": (*cut.own_inputs, *cut.carried),
        },
        outputs={
            "setup": (*(value for _, value in cut.other_results), *cut.carried),
            "steady": (*outputs, *cut.carried),
            "cleanup": tuple(value for _, value in cut.moved),
        },
        transformed=(*step.transformed, _summary(block, hidden)),
    )


def _resolved(step: StepGraph, entries: object) -> Sequence[ResolvedEntry]:
    where = f"{NAME}: entries"
    listed = parse_entries(entries, where)
    if not listed:
        raise PlanError(f'{where} names none; name those that are to move, as in entries = ["layers.3"]')
    return resolve(listed, step.names, step.modules, aliases=step.names, unplanned="allow", where=where).entries


def _summary(block: Block, hidden: Sequence[int]) -> Transformed:
    done, left = [], []
    for entry in dict.fromkeys(block.entry_of.values()):
        pairs = zip(block.reductions, hidden, strict=True)
        # An entry is ready when its last reduction is, so the one that is hidden least counts.
        count = min(computes for reduction, computes in pairs if entry in block.entries([reduction]))
        done.append(f"reduces and updates {entry} in the next call, behind {count} nodes of compute there")
        if not count:
            why = "it moves, but its parameters are needed before anything is computed there; move one that is read later"
            left.append((f"reduction of {entry}", why))
    return Transformed(NAME, tuple(done), tuple(left))
