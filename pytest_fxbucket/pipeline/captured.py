"""From a plan to its stages, traced: for each rank the graphs that its place along ``pp`` has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import fx

from pytest_fxbucket.capture.backward import StageRead
from pytest_fxbucket.capture.clip import AcrossStages, Clip
from pytest_fxbucket.capture.from_plan import ModelTraced, model_traced
from pytest_fxbucket.capture.optimizers.optimizer import Optimizing
from pytest_fxbucket.capture.optimizers.update import TracedUpdate
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.compat.c10d import collective
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode, grouped
from pytest_fxbucket.errors import CaptureError, StageError
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.pipeline.cut import cut_places, naming_plan
from pytest_fxbucket.pipeline.microbatch import Microbatch, trace_microbatch, trace_reduce, trace_unshard
from pytest_fxbucket.pipeline.partition import MicrobatchParts, part_microbatch
from pytest_fxbucket.plan.pipeline_schedules import rank_of_stage
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.step.mesh import Mesh, fake_mesh
from pytest_fxbucket.step.pipelined import TIES, UPDATE, Pipelined, Work, phase_of
from pytest_fxbucket.step.roles import Parameter, StepGraph, Value

Described = tuple[fx.GraphModule, tuple[Value, ...], tuple[Value, ...]]
"""A graph with its inputs and outputs."""
_IN_TWO_PARTS = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that run backward in two parts: ``input``, which the stage before waits for, and ``weight``."""


@dataclass(frozen=True)
class StagedStep:
    """The stages of one step, the same on every rank."""

    plan: Plan
    model: ModelTraced
    microbatch: Microbatch
    parted: MicrobatchParts
    pipelined: Pipelined
    whole: StepGraph
    """The same step traced without stages."""
    _of_stages: dict[int, dict[Work, Described]] = field(default_factory=dict)
    """Graphs that a stage runs once a step; the same on all its ranks, so each is traced once."""
    _updates: dict[tuple[str, ...], list[tuple[Clip | None, TracedUpdate]]] = field(default_factory=dict)
    """Traced updates by the FQNs of their gradients, each with how it clips them."""

    def under(self, plan: Plan, mesh: Mesh) -> StagedStep:
        """The same traced stages under the schedule of ``plan``, another plan that traces the same step."""
        with fake_mesh(mesh, 0):
            return replace(self, plan=plan, pipelined=_pipelined(plan, mesh, self.microbatch, self.parted))

    def of_rank(self, mesh: Mesh, rank: int) -> StepGraph:
        """The step as ``rank`` of ``mesh`` has it; its process groups, real or fake, must be there."""
        place = mesh.at(rank, "pp")
        graphs: dict[str, Described] = {}
        for stage in self._stages_at(place):
            once = self._once(stage)
            graphs |= {phase_of(stage, "unshard"): once["unshard"]} if "unshard" in once else {}
            for work in self._works:
                # A part that gives nothing is left out: in the first stage nobody waits for ``input``, so all is in ``weight``.
                part = self.parted.part(stage, work)
                if part.outputs:
                    graphs[phase_of(stage, work)] = part.graph_module, part.inputs, part.outputs
            graphs |= {phase_of(stage, "reduce"): once["reduce"]} if "reduce" in once else {}
        if ties := self._ties(place, mesh):
            graphs[TIES] = ties
        if self.optimizing is not None:
            update = self._update(self.optimizing, tuple(self._gradients_at(place)), self._clip(mesh))
            graphs[UPDATE] = update.graph_module, update.inputs, update.outputs
        return replace(
            self.whole,
            graphs={phase: graph for phase, (graph, _, _) in graphs.items()},
            inputs={phase: inputs for phase, (_, inputs, _) in graphs.items()},
            outputs={phase: outputs for phase, (_, _, outputs) in graphs.items()},
            rank=rank,
            pipelined=self.pipelined,
        )

    @cached_property
    def optimizing(self) -> Optimizing | None:
        """How the plan's optimizers are made; None for a plan without any."""
        return self.model.optimizing(self.microbatch.parameters) if self.plan.optimizer else None

    @cached_property
    def _reads(self) -> list[list[StageRead]]:
        """Parameters that each stage reads, in order of first reads."""
        return _by_stage(self.microbatch.gathered, self.pipelined.stages)

    @cached_property
    def _gradients_made(self) -> list[list[StageRead]]:
        """Parameters that each stage makes gradients of, in the order in which backward makes them."""
        return _by_stage(_as_made(self.microbatch), self.pipelined.stages)

    @property
    def _works(self) -> tuple[Work, ...]:
        return ("forward", "input", "weight") if self.pipelined.schedule in _IN_TWO_PARTS else ("forward", "backward")

    def _once(self, stage: int) -> dict[Work, Described]:
        """The graphs that ``stage`` runs once a step: gathers and reductions, each only if the stage has any."""
        if stage not in self._of_stages:
            found = self._of_stages[stage] = {}
            if gathered := self._reads[stage]:
                found["unshard"] = trace_unshard(self.microbatch, gathered)
            if reduced := self._gradients_made[stage]:
                found["reduce"] = trace_reduce(self.microbatch, reduced)
        return self._of_stages[stage]

    def _update(self, optimizing: Optimizing, gradients: tuple[str, ...], clip: Clip | None) -> TracedUpdate:
        # A Clip holds a mapping, so it has no hash: the few of one set of gradients are compared one by one.
        known = self._updates.setdefault(gradients, [])
        for of, update in known:
            if of == clip:
                return update
        update = self.model.update(optimizing, self.microbatch.parameters, gradients, clip)
        known.append((clip, update))
        return update

    def _stages_at(self, place: int) -> list[int]:
        return [stage for stage, at in enumerate(self.pipelined.pp_places) if at == place]

    def _gradients_at(self, place: int) -> list[str]:
        """FQNs of the parameters whose gradients the rank at ``place`` has, in registration order."""
        stages = set(self._stages_at(place))
        found = {read.fqn for read in self.microbatch.reads if read.stage in stages}
        return [parameter.fqn for parameter in self.microbatch.parameters if parameter.fqn in found]

    def _ties(self, place: int, mesh: Mesh) -> Described | None:
        """The graph that sums gradients of tied parameters over the stages that read them; None if the rank sums none."""
        # Sums go from the last stage to the first, which is the order of the whole step's backward. Where the stages of a tie
        # are on several ranks, each stage's gradient is gathered by itself, and every rank adds them in that order, so all get
        # the same bits. All ranks along pp take part in those gathers, with zeros for stages that they do not have.
        tied, places, group = dict(self.pipelined.ties), self.pipelined.pp_places, mesh.group("pp")
        by_fqn = {parameter.fqn: parameter for parameter in self.microbatch.parameters}
        inputs: list[Value] = []
        for fqn, stages in tied.items():
            inputs += [_gradient(by_fqn[fqn]) for stage in stages if places[stage] == place]
        # Two stages on this rank give two inputs of one name, and their sum is one output.
        outputs = list(dict.fromkeys(inputs))
        apart = {fqn for fqn, stages in tied.items() if len({places[stage] for stage in stages}) > 1}
        if not inputs and not apart:
            return None

        def summed(*gradients: torch.Tensor) -> list[torch.Tensor]:
            found, own = [], iter(gradients)
            for fqn, stages in tied.items():
                here = {stage: next(own) for stage in stages if places[stage] == place}
                # Tied within one other rank: that rank sums alone, and no gather is to be joined.
                if not here and fqn not in apart:
                    continue
                total: torch.Tensor | None = None
                for stage in reversed(stages):
                    one = here.get(stage, torch.zeros(by_fqn[fqn].shard_shape, dtype=by_fqn[fqn].dtype))
                    if fqn in apart:
                        gathered = collective("all_gather_into_tensor", one.unsqueeze(0), group.size, group.name)
                        one = gathered.select(0, places[stage])
                    total = one if total is None else total + one
                if here:
                    assert total is not None
                    found.append(total)
            return found

        with FakeTensorMode():
            tensors = [torch.empty(value.shape, dtype=value.dtype) for value in inputs]
            return tracing.trace(summed, tensors), tuple(inputs), tuple(outputs)

    def _clip(self, mesh: Mesh) -> Clip | None:
        clip = self.model.clip(self.microbatch.parameters)
        if clip is None or mesh.degree("pp") == 1:
            return clip
        # A rank has norms of its own stages' gradients only. They are gathered over pp and stacked in the order in which one
        # rank with all gradients would stack them, so that the sum of their squares has the same bits as in the whole step.
        everywhere = {read.fqn for read in self.microbatch.reads}
        names = [self._stacked(self._gradients_at(place)) for place in range(mesh.degree("pp"))]
        for place, own in enumerate(names):
            if not own:
                stages = self._stages_at(place)
                raise CaptureError(
                    f"{self.plan.path}: [step] clip_norm is of all stages, and stage {stages[0]} has no trainable parameter; "
                    "put the cuts of [pipeline] elsewhere, or leave clip_norm out"
                )
        order = self._stacked([one.fqn for one in self.microbatch.parameters if one.fqn in everywhere])
        dtype = reduce(torch.promote_types, {one.dtype for one in self.microbatch.parameters if one.fqn in everywhere})
        return replace(clip, across=AcrossStages(mesh.group("pp").name, tuple(map(tuple, names)), tuple(order), dtype))

    def _stacked(self, fqns: Sequence[str]) -> list[str]:
        """``fqns`` in the order in which norms of their gradients are stacked: those of one dtype side by side."""
        # The order of the groups is torch's own and cannot be told beforehand, so torch is asked, with a fake for each
        # gradient.
        by_fqn = {parameter.fqn: parameter for parameter in self.microbatch.parameters}
        with FakeTensorMode():
            fakes = {fqn: torch.empty(by_fqn[fqn].shard_shape, dtype=by_fqn[fqn].dtype) for fqn in fqns}
        if not fakes:
            return []  # torch's grouping does not take an empty list
        names = {id(fake): fqn for fqn, fake in fakes.items()}
        return [names[id(fake)] for group in grouped(list(fakes.values())) for fake in group]


def capture_stages(plan: Plan, mesh: Mesh, whole: StepGraph) -> StagedStep:
    """The stages of ``plan`` as the ranks of ``mesh`` have them; ``whole`` is the plan's step without stages.

    Raises :class:`StageError` for cuts that do not part the model, :class:`CaptureError` for a step that cannot be staged. The
    plan's folders must be on ``sys.path``.
    """
    with fake_mesh(mesh, 0), model_traced(plan, mesh, 0) as model:
        microbatch = trace_microbatch(model)
        stages = len(model.cuts) + 1
        with naming_plan(plan):
            _refuse_within_overridden(microbatch, model)
            _refuse_cuts(microbatch, model.cuts)
        _refuse_within_checkpoints(plan, microbatch, model)
        parted = part_microbatch(microbatch, stages)
        return StagedStep(plan, model, microbatch, parted, _pipelined(plan, mesh, microbatch, parted), whole)


def _pipelined(plan: Plan, mesh: Mesh, microbatch: Microbatch, parted: MicrobatchParts) -> Pipelined:
    assert plan.pipeline is not None
    schedule, stages, ranks = plan.pipeline.schedule, len(parted.forward) + 1, mesh.degree("pp")
    places = tuple(rank_of_stage(schedule, stages, ranks, stage) for stage in range(stages))
    group, tied = mesh.group("pp").name, _tied(microbatch)
    return Pipelined(schedule, plan.step.microbatches, places, parted.forward, parted.backward, tied, group)


def _refuse_cuts(microbatch: Microbatch, cuts: Sequence[str]) -> None:
    # The trace has marked nodes with their stages already. Only the refusals are wanted here, not the places.
    nodes = list(microbatch.graph_module.graph.nodes)
    calls, work = microbatch.marks.calls, []
    for place, node in enumerate(nodes):
        if node.op not in ("placeholder", "get_attr", "output") and not node.meta.get("autograd_backward"):
            work.append(place)
    cut_places(list(cuts), calls, microbatch.modules, work)


def _refuse_within_overridden(microbatch: Microbatch, model: ModelTraced) -> None:
    for fqn in model.overrides.of:
        for cut in model.cuts:
            if microbatch.modules.get(cut, cut).startswith(f"{fqn}."):
                raise StageError(f'cut "{cut}" is inside of {fqn}, which is overridden and not traced; cut behind "{fqn}"')


def _refuse_within_checkpoints(plan: Plan, microbatch: Microbatch, model: ModelTraced) -> None:
    calls, modules = microbatch.marks.calls, microbatch.modules
    for fqn in model.forwards.recomputed:
        for cut in model.cuts:
            ((begin, end),) = calls[modules[cut]]  # one call: cuts behind modules of several calls are refused before
            within = any(first <= begin and end <= last for first, last in calls.get(modules[fqn], ()))
            # A cut behind the checkpointed module itself has all of that module in one stage.
            if within and modules[cut] != modules[fqn]:
                raise CaptureError(
                    f'{plan.path}: [pipeline] cut "{cut}" is inside of {fqn}, which [step] checkpoint computes again in '
                    f'backward, as a whole and in one stage; cut behind "{fqn}", or checkpoint what is within one stage'
                )


def _as_made(microbatch: Microbatch) -> list[StageRead]:
    """Reads in the order in which backward makes their gradients."""
    index = {node: number for number, node in enumerate(microbatch.graph_module.graph.nodes)}
    _, *gradients = returned(microbatch.graph_module.graph.output_node())
    made = {read: index[node] for read, node in zip(microbatch.reads, gradients, strict=True)}
    # Parameters that are added to each other may have one gradient node: the read then settles the order.
    return sorted(microbatch.reads, key=lambda read: (made[read], read))


def _by_stage(reads: Sequence[StageRead], stages: int) -> list[list[StageRead]]:
    found: list[list[StageRead]] = [[] for _ in range(stages)]
    for read in reads:
        found[read.stage].append(read)
    return found


def _tied(microbatch: Microbatch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    stages: dict[str, list[int]] = {}
    for read in sorted(microbatch.reads):
        stages.setdefault(read.fqn, []).append(read.stage)
    order = [one.fqn for one in microbatch.parameters]
    return tuple((fqn, tuple(stages[fqn])) for fqn in order if len(stages.get(fqn, ())) > 1)


def _gradient(parameter: Parameter) -> Value:
    return Value("grad", parameter.fqn, parameter.shard_shape, parameter.dtype)
