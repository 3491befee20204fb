"""The stages of all ranks along ``pp``, put together into one graph again: each receives what the others send it.

That graph is to compute what the microbatch's graph computes, which the stages were parted from. On the way are found values
that a stage reads and does not receive, and values that it receives and nobody reads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.graph.ops import held_by, returned
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.pipeline.captured import StagedStep
from pytest_fxbucket.step.pipelined import TIES, UPDATE, Crossing, Pipelined, Work, phase_of
from pytest_fxbucket.step.roles import Key, StepGraph, Value
from pytest_fxbucket.words import times

BACKWARD: tuple[Work, ...] = ("backward", "input", "weight")
PART = "fxbucket_part"
"""Key in ``meta`` of the phase that a node of a composed graph comes from, such as ``stage 0 forward``."""
WORKS: tuple[Work, ...] = ("forward", *BACKWARD)


@dataclass
class ComposedStep:
    """One microbatch's forward and backward through all stages."""

    graph_module: fx.GraphModule | None
    """The composed graph, which takes the inputs of the microbatch's graph; None if ``problems`` do not let it be composed."""
    whole: fx.GraphModule | None = None
    """The microbatch's graph, with the same outputs."""
    outputs: tuple[Value, ...] = ()
    """The values that stages receive, the loss, and the gradients, each gradient by the FQN of its parameter and its stage."""
    problems: list[str] = field(default_factory=list)
    """Stages that do not fit together, and modules that are in another stage than the plan's cuts say: a sentence each."""


def composed(staged: StagedStep, places: Sequence[StepGraph], graphs: Sequence[Mapping[str, Any]]) -> ComposedStep:
    """Put the stages together: ``places`` are the steps of the ranks along ``pp``, ``graphs`` each rank's graphs by phase."""
    how = places[0].pipelined
    assert how is not None
    if odd := next((place for place, step in enumerate(places) if step.pipelined != how), None):
        return ComposedStep(None, problems=[_disagreement(how, places[odd].pipelined, odd)])
    return _Composing(staged, how, places, graphs).run()


def gradient_of(fqn: str, stage: int) -> Value:
    """The output of a composed graph that is the gradient of a parameter in one of the stages that read it."""
    return Value("unreduced", f"{fqn} of stage {stage}", (), None)


def _disagreement(how: Pipelined, other: Pipelined | None, place: int) -> str:
    """A sentence on where two ranks along ``pp`` describe the stages differently."""
    begin = f"ranks 0 and {place} of pp do not agree"
    if other is None:
        return f"{begin}: rank {place} has no pipeline stages"
    for way, ours, theirs in (("forward", how.forward, other.forward), ("back", how.backward, other.backward)):
        for cut, (one, two) in enumerate(zip(ours, theirs, strict=False)):
            a, b = ([value.name for value in flow] for flow in (one, two))
            if a != b:
                at = next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
                here, there = (names[at] if at < len(names) else "nothing" for names in (a, b))
                return (
                    f"{begin} on what crosses {way} between stages {cut} and {cut + 1}: tensor {at + 1} is {here} on the one, "
                    f"{there} on the other"
                )
            for value, its in zip(one, two, strict=False):
                if value != its:
                    return f"{begin} on {value.name}, which crosses {way} between stages {cut} and {cut + 1}: {value} and {its}"
    return f"{begin} on the schedule, the places of stages, ties or the process group"


class _Composing:
    def __init__(
        self, staged: StagedStep, how: Pipelined, places: Sequence[StepGraph], graphs: Sequence[Mapping[str, Any]]
    ) -> None:
        self.staged, self.how, self.places, self.graphs = staged, how, places, graphs
        self.graph, self.constants = fx.Graph(), dict[str, Any]()
        self.given: dict[Key, fx.Node] = {}
        microbatch = staged.microbatch
        for node, value in zip(microbatch.graph_module.graph.find_nodes(op="placeholder"), microbatch.inputs, strict=True):
            self.given[value.key] = made = self.graph.placeholder(node.name)
            made.meta = dict(node.meta)
        # By stage: nodes of the composed graph under the names that values have when they cross; the names that the stage has
        # read or sent on; and what it has received.
        self.have: list[dict[str, fx.Node]] = [{} for _ in how.pp_places]
        self.read: list[set[str]] = [set() for _ in how.pp_places]
        self.received: list[dict[str, Crossing]] = [{} for _ in how.pp_places]
        self.results: dict[Key, fx.Node] = {}
        self.crossed: dict[str, str] = {}
        """Names of received values among the results, each to the value's name in the microbatch's graph."""
        self.problems: list[str] = []

    def run(self) -> ComposedStep:
        # One microbatch in time order: forward through the stages, then back. To cross a cut is to hand the sender's node to
        # the receiver, so a stage computes with what was really sent. Received values are outputs too, beside loss and
        # gradients: each can then be compared with the value of its name in the microbatch's graph.
        count = self.how.stages
        # The first stage alone is given the batch; a later one that reads of it must have received that.
        self.have[0] = {name: node for (role, name), node in self.given.items() if role == "batch"}
        for stage in range(count):
            if stage:
                self._cross(stage - 1, stage, self.how.forward[stage - 1], "forward")
            self._part(stage, "forward")
        for stage in reversed(range(count)):
            if stage + 1 < count:
                self._cross(stage + 1, stage, self.how.backward[stage], "back")
            for work in BACKWARD:
                self._part(stage, work)
            self._kept_waiting(stage)
        # Only if all else fits: a part that could not be put in reads nothing.
        if not self.problems:
            self._unread()
        wanted = [Value("loss", "", (), None)] + [gradient_of(*read) for read in self.staged.microbatch.reads]
        for value in wanted:
            if value.key not in self.results and not self.problems:
                self.problems.append(f"no stage gives the {'loss' if value.role == 'loss' else f'gradient of {value.fqn}'}")
        if self.problems:
            return ComposedStep(None, problems=self.problems)
        wanted = [Value("crossing", name, (), None) for name in self.crossed] + wanted
        self.graph.output([self.results[value.key] for value in wanted])
        self.graph.lint()
        graph_module = uncompiled(self.constants, self.graph)
        return ComposedStep(graph_module, self._whole(), tuple(wanted), self._beyond_cuts())

    def _beyond_cuts(self) -> list[str]:
        """A sentence for each module that runs in another stage than the plan's cuts say."""
        microbatch, pipeline, found = self.staged.microbatch, self.staged.plan.pipeline, dict[str, str]()
        assert pipeline is not None
        calls, phases = microbatch.marks.calls, {phase_of(stage, "forward"): stage for stage in range(self.how.stages)}
        ends = [calls[microbatch.modules[cut]][0][1] for cut in pipeline.cuts]
        for node in self.graph.nodes:
            fqn, stage = module_of(node), phases.get(node.meta.get(PART, ""))
            if stage is None or fqn not in calls or node.target is torch.ops.aten.detach.default:
                continue  # a stage reads a tied parameter by a detach that is named after the first module that has it
            # Cuts up to the begin of its first call are before a module, cuts from the end of its last call on are behind it.
            first, last = bisect_right(ends, calls[fqn][0][0]), bisect_left(ends, calls[fqn][-1][1])
            if not first <= stage <= last:
                said = f"stage {first}" if first == last else f"stages {first} to {last}"
                found.setdefault(fqn, f"stage {stage} runs {fqn} ({node.name}), which is in {said} by the plan's cuts")
        return list(found.values())

    def _whole(self) -> fx.GraphModule:
        microbatch, graph, copies = self.staged.microbatch, fx.Graph(), dict[fx.Node, fx.Node]()
        gives = graph.graph_copy(microbatch.graph_module.graph, copies)
        named = {node.name: copy for node, copy in copies.items()}
        placeholders = microbatch.graph_module.graph.find_nodes(op="placeholder")
        given = {value.fqn: copies[node] for node, value in zip(placeholders, microbatch.inputs, strict=True)}
        # A tensor of the batch crosses under its path in the arguments, all else under the name of its node.
        crossed = [given[name] if name in given else named[name] for name in self.crossed.values()]
        assert isinstance(gives, (list, tuple))
        graph.output([*crossed, *gives])
        return uncompiled(microbatch.graph_module, graph)

    def _cross(self, sender: int, receiver: int, flow: Sequence[Crossing], way: str) -> None:
        for one in flow:
            if one.name not in self.have[sender]:
                self.problems.append(f"stage {sender} is to send {one.name} {way}, but neither makes nor receives it")
                continue
            made = self.have[sender][one.name]
            if other := _other_layout(made, one):
                self.problems.append(f"stage {sender} is to send {one.name} {way} as {other}")
            name = f"{one.name} of stage {one.stage} as stage {receiver} receives it"
            self.results["crossing", name], self.crossed[name] = made, one.name
            self.have[receiver][one.name] = made
            self.received[receiver][one.name] = one
            self.read[sender].add(one.name)

    def _part(self, stage: int, work: Work) -> None:
        """Inline the graph of ``stage`` for ``work``."""
        step, phase = self.places[self.how.pp_places[stage]], phase_of(stage, work)
        # A stage has either ``backward`` or its two parts, and no graph for a part that gives nothing.
        if phase not in step.graphs:
            return
        module: fx.GraphModule = self.graphs[self.how.pp_places[stage]][phase]
        copies: dict[fx.Node, fx.Node] = {}
        for node, value in zip(module.graph.find_nodes(op="placeholder"), step.inputs[phase], strict=True):
            source = self._source(stage, value)
            if source is None:
                self.problems.append(f"stage {stage} reads {value.fqn} in {work}, which it has not received")
                return
            copies[node] = source
        for node in module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = self._copied(node, module, copies, phase)
                copies[node].meta[PART] = phase
        for value, node in zip(step.outputs[phase], returned(module.graph.output_node()), strict=True):
            if value.role == "crossing":
                self.have[stage][value.fqn] = copies[node]
            elif value.role == "loss":
                self.results["loss", ""] = copies[node]
            else:
                named = gradient_of(value.fqn, stage)
                if named.key in self.results:
                    self.problems.append(f"stage {stage} gives the gradient of {value.fqn} twice")
                self.results[named.key] = copies[node]

    def _kept_waiting(self, stage: int) -> None:
        """Find gradients of weights in ``input`` that nothing sent back needs: the stage before would wait for them in vain."""
        place, phase = self.how.pp_places[stage], phase_of(stage, "input")
        if phase not in self.places[place].graphs:
            return
        # Back through the graph from what is sent to the stage before; a gradient that is not met on the way is not needed
        # there.
        order = order_of(self.graphs[place][phase].graph)
        indices = map(order.index.__getitem__, returned(order.nodes[-1]))
        given = list(zip(self.places[place].outputs[phase], indices, strict=True))
        sent = {one.name for one in self.how.backward[stage - 1]} if stage else set[str]()
        starts = (index for value, index in given if value.role == "crossing" and value.fqn in sent)
        needed = set(reached(starts, order.before.__getitem__))
        self.problems += (
            f"stage {stage} gives the gradient of {value.fqn} in input, where the stage before waits and does not need it"
            for value, index in given
            if value.role == "unreduced" and index not in needed
        )

    def _source(self, stage: int, value: Value) -> fx.Node | None:
        if value.role in ("crossing", "batch"):
            self.read[stage].add(value.fqn)
            return self.have[stage].get(value.fqn)
        # Parameters and buffers are inputs of the microbatch's graph, the same for all stages, so a tied one stays one input.
        return self.given.get(value.key)

    def _copied(self, node: fx.Node, module: fx.GraphModule, copies: dict[fx.Node, fx.Node], phase: str) -> fx.Node:
        made = self.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            # Constants of two parts may have one name, so each gets the name of its phase before its own.
            made.target = f"{phase}_{node.target}".replace(" ", "_").replace(".", "_")
            self.constants[made.target] = held_by(module, str(node.target))
        return made

    def _unread(self) -> None:
        for stage, received in enumerate(self.received):
            for name in received:
                if name not in self.read[stage]:
                    self.problems.append(f"stage {stage} receives {name}, which it neither reads nor sends on")


def _other_layout(made: fx.Node, said: Crossing) -> str | None:
    """The layout that ``said`` has for a value that crosses, and the layout that it has; None if they agree.

    The receiver gives kernels the value in the layout of ``said``.
    """
    value = made.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    own = tuple(value.shape), tuple(value.stride()), value.dtype
    if own == (said.shape, said.strides, said.dtype):
        return None
    theirs, ours = (f"{list(a)} with strides {list(b)} in {c}" for a, b, c in ((said.shape, said.strides, said.dtype), own))
    return f"{theirs}, but it is {ours}"


def parameter_problems(staged: StagedStep, places: Sequence[StepGraph]) -> list[str]:
    """Parameters that are not gathered, reduced, tied, summed or updated where they should be: a sentence each."""
    how, problems = staged.pipelined, list[str]()
    tied = dict(how.ties)
    reduced: dict[str, list[int]] = {}
    for stage, place in enumerate(how.pp_places):
        for value in places[place].outputs.get(phase_of(stage, "reduce"), ()):
            reduced.setdefault(value.fqn, []).append(stage)
    for fqn, stages in reduced.items():
        if len(stages) > 1 and tuple(stages) != tied.get(fqn):
            problems.append(f"stages {', '.join(map(str, stages))} each give a gradient of {fqn}, and no tie has them together")
        problems += _sum_problems(fqn, stages, how, places) if fqn in tied else []
    for fqn, readers in tied.items():
        if missing := [stage for stage in readers if stage not in reduced.get(fqn, ())]:
            problems.append(f"stage {missing[0]} gives no gradient of {fqn}, which it is tied by")
    return (
        problems
        + _lost(staged, places, reduced)
        + [line for n, one in enumerate(places) for line in _rank_lost(staged, n, one)]
    )


def _lost(staged: StagedStep, places: Sequence[StepGraph], reduced: Mapping[str, Sequence[int]]) -> list[str]:
    """Parameters that a stage reads and does not gather, or makes a gradient of and does not reduce once."""
    how, problems = staged.pipelined, list[str]()
    for stage, place in enumerate(how.pp_places):
        step = places[place]
        gathered = {value.fqn for value in step.outputs.get(phase_of(stage, "unshard"), ())}
        for work in WORKS:
            for value in step.inputs.get(phase_of(stage, work), ()):
                if value.role == "whole" and value.fqn not in gathered:
                    problems.append(f"stage {stage} reads {value.fqn} in {work}, which it does not gather")
    for read in staged.microbatch.reads:
        if (given := reduced.get(read.fqn, ()).count(read.stage)) != 1:
            problems.append(f"stage {read.stage} reduces the gradient of {read.fqn} {times(given)}, expected once")
    return problems


def _rank_lost(staged: StagedStep, place: int, step: StepGraph) -> list[str]:
    """Parameters that the rank at ``place`` updates without reading them in any stage, or reads and does not update."""
    how = staged.pipelined
    # In reverse, so that of several stages that read a parameter the first one is left to be named.
    own = {read.fqn: read.stage for read in sorted(staged.microbatch.reads, reverse=True) if how.pp_places[read.stage] == place}
    wanted = [value.fqn for values in staged.whole.outputs.values() for value in values if value.role == "param"]
    updated = [value.fqn for value in step.outputs.get(UPDATE, ()) if value.role == "param"]
    stages = ", ".join(str(stage) for stage, at in enumerate(how.pp_places) if at == place)
    return [
        *(f"rank {place} of pp updates {fqn}, which its stages, {stages}, do not read" for fqn in updated if fqn not in own),
        *(
            f"rank {place} of pp does not update {fqn}, which its stage {own[fqn]} reads"
            for fqn in wanted
            if fqn in own and fqn not in updated
        ),
    ]


def _sum_problems(fqn: str, stages: Sequence[int], how: Pipelined, places: Sequence[StepGraph]) -> list[str]:
    problems = []
    for place in dict.fromkeys(how.pp_places[stage] for stage in stages):
        own = [stage for stage in stages if how.pp_places[stage] == place]
        taken = [value for value in places[place].inputs.get(TIES, ()) if value.fqn == fqn]
        given = [value for value in places[place].outputs.get(TIES, ()) if value.fqn == fqn]
        if len(taken) != len(own) or len(given) != 1:
            problems.append(
                f"rank {place} of pp has the tied parameter {fqn} in stages {', '.join(map(str, own))}, but sums "
                f"{len(taken)} of its gradients into {len(given)}"
            )
    return problems
