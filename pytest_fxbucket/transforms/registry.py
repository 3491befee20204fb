"""The transformations of a plan: imported, checked for their order, and run one after the other on copies of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from inspect import signature
from typing import Any

import torch

from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.errors import FxbucketError, PassError, PlanError
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.process.elsewhere import hold
from pytest_fxbucket.process.state import reset
from pytest_fxbucket.step.portable import digest, encode, own_copy, raw_bytes
from pytest_fxbucket.step.roles import Phase, StepGraph
from pytest_fxbucket.transforms.fit import ObservedGraph, look, refuse_broken, refuse_unpaired
from pytest_fxbucket.transforms.transformation import BUCKET, Traits, traits_of
from pytest_fxbucket.user_frame import naming_user_frame

BUILT_IN = {
    name: f"pytest_fxbucket.transforms.{name}:{name}" for name in ("merge_duplicates", "add_before_reducing", "next_iteration")
}
"""Import paths of our own transformations, by their names in a plan."""


@dataclass(frozen=True)
class TransformStages:
    """A plan's transformations before and after the pass, in order."""

    before: tuple[TransformStage, ...] = ()
    after: tuple[TransformStage, ...] = ()
    modules: tuple[str, ...] = ()
    """Modules of transformations that are not ours: importing them may register operators that the graph calls."""


def stages_of(plan: Plan) -> TransformStages:
    """The transformations that ``plan`` lists, the pass in its place.

    Raises PlanError, one sentence that names the table, for what cannot be imported and for an order that a transformation's
    traits do not allow. The plan's folders must be on ``sys.path``.
    """
    if not plan.transform:
        return TransformStages()
    stages: list[TransformStage] = []
    place: int | None = None
    for number, one in enumerate(plan.transform, 1):
        where = f"{plan.path}: [[transform]] {number}"
        if one.name == BUCKET:
            place = len(stages) if place is None else place
            continue
        function = import_callable(BUILT_IN.get(one.name, one.name), where)
        stages.append(TransformStage(one.name, f"{where}: {one.name}", function, one.args))
        if plan.pipeline is not None:
            _refuse_beside_pipeline(stages[-1])
    # A plan that does not list the pass has it before the first transformation that must follow it, else behind all.
    if place is None:
        place = next((n for n, stage in enumerate(stages) if BUCKET in traits_of(stage.function).after), len(stages))
    refuse_order(stages, place)
    foreign = (stage.name.partition(":")[0] for stage in stages if stage.name not in BUILT_IN)
    return TransformStages(tuple(stages[:place]), tuple(stages[place:]), tuple(dict.fromkeys(foreign)))


def refuse_order(stages: Sequence[TransformStage], place: int | None = None) -> None:
    """Raise PlanError for an order that a transformation's traits do not allow.

    ``place``: how many of ``stages`` come before the pass; None where there is no plan, whose pass would be among them.
    """
    # The pass takes part as a stage without demands of its own, so that names in ``before`` and ``after`` find it.
    order = [(stage.name, stage.where, traits_of(stage.function)) for stage in stages]
    if place is not None:
        order.insert(place, (BUCKET, "", Traits()))
        _refuse_late_rounding(order)
    for number, (_, where, traits) in enumerate(order):
        later = [other for other, _, _ in order[number + 1 :]]
        if wrong := next((other for other in traits.after if other in later), None):
            raise PlanError(f"{where} must come after {wrong}; list it below that")
        if traits.crosses_iterations and later:
            raise PlanError(f"{where} gives three graphs, and {later[0]} stands behind it; list it last")
        earlier = [other for other, _, _ in order[:number]]
        if wrong := next((other for other in traits.before if other in earlier), None):
            raise PlanError(f"{where} must come before {wrong}; list it above that")


def _refuse_beside_pipeline(stage: TransformStage) -> None:
    traits = traits_of(stage.function)
    why = "rounds otherwise than the step before it" if traits.rounds else ""
    why = "gives set-up, steady and clean-up graphs" if traits.crosses_iterations else why
    if why:
        raise PlanError(
            f"{stage.where} {why}, and [pipeline] has the graphs of stages, bit for bit the step that is in none; leave one of "
            "them out, by a matrix row"
        )


def _refuse_late_rounding(order: Sequence[tuple[str, str, Traits]]) -> None:
    """Refuse an order that leaves a transformation uncompared.

    Bitwise compares with the step behind the last transformation that rounds. So the pass and all that does not round must come
    behind it.
    """
    names = [name for name, _, _ in order]
    for number, (name, where, traits) in enumerate(order):
        if traits.rounds and BUCKET in names[:number]:
            raise PlanError(
                f"{where} rounds otherwise than the step before it, so it must come before {BUCKET}: what comes after is "
                "compared bit for bit; list it above that"
            )
        late = next((other for other, _, its in order[number:] if its.rounds), "")
        if late and not traits.rounds and name != BUCKET:
            raise PlanError(
                f"{where} must come after {late}, which rounds otherwise: what comes before that is compared with nothing; "
                "list it below that"
            )


# Running transformations: one after the other, each on a copy of the step, which is checked after each.


State = dict[str, "torch.Tensor"]
Transform = Callable[..., "StepGraph"]
"""``(step, state, **args)`` to the same step, changed. The graphs are the transformation's own: it may work in place.

To add state it adds a placeholder, the :class:`Value` of that at the same place among the inputs, a new value among the
outputs, and the first tensor to ``state``. To remove state it removes all of these.
"""
_NEEDS = {
    "roles": "the roles of the graph's inputs and outputs; let the [graph] factory return a TracedStep with roles and fqns",
    "optimizer": "the update of an optimizer, and the step has none; add [optimizer]",
}


@dataclass(frozen=True)
class TransformStage:
    """One transformation of a step, with its arguments."""

    name: str
    where: str
    """Beginning of its errors: the place in the plan that asks for it, and its name."""
    function: Transform
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TransformOutput:
    """A step as a transformation left it."""

    name: str
    step: StepGraph
    looked: Mapping[Phase, ObservedGraph]


def run_stages(
    stages: Sequence[TransformStage], step: StepGraph, state: State, *, twice: bool = False
) -> list[TransformOutput]:
    """The step after each of ``stages``, with its rank's process groups in place; ``step`` itself is left as it is.

    ``state`` has all state by name, and is changed. With ``twice`` one that is not ours is called again, to see that it gives
    the same. Raises PlanError for arguments that a transformation does not take, CaptureError or PassError, one sentence that
    names it, for one that cannot be done, that breaks the step or that goes by more than the step.
    """
    found: list[TransformOutput] = []
    looked = look(step) if stages else {}
    for stage in stages:
        begun = _copied(state)
        if twice:
            reset()  # first values of state may be drawn
        after = _run(stage, step, state)
        seen = _look(stage, after, looked)
        if twice and stage.name not in BUILT_IN:
            _hold(stage, step, begun, looked, _digest(stage, after, state))
        found.append(TransformOutput(stage.name, after, seen))
        step, looked = after, seen
    return found


def _look(stage: TransformStage, step: StepGraph, before: Mapping[Phase, ObservedGraph]) -> dict[Phase, ObservedGraph]:
    """What ``stage`` made, looked at; raises PassError, one sentence that names it, for what it broke."""
    with _naming(stage):
        after = look(step, before)
    refuse_broken(stage.where, before, after, traits_of(stage.function).keeps_collectives)
    return after


def _hold(stage: TransformStage, step: StepGraph, begun: State, looked: Mapping[Phase, ObservedGraph], made: str) -> None:
    """Raise PassError if ``stage`` makes another thing of ``step`` and of the state ``begun`` when it is called elsewhere."""

    def again() -> str:
        reset()
        state = _copied(begun)
        after = _run(stage, step, state)
        _look(stage, after, looked)
        return _digest(stage, after, state)

    hold(stage.where, made, again)


def _copied(state: State) -> State:
    """``state``, whose values a call may change in place; an optimizer's own has none here."""
    return {fqn: one if isinstance(one, FakeTensor) else one.clone() for fqn, one in state.items()}


def _digest(stage: TransformStage, step: StepGraph, state: State) -> str:
    """Of the graphs of ``step``, of what goes in and out, and of first values in ``state``."""
    values = [sha256(raw_bytes(one)).hexdigest() for _, one in sorted(state.items()) if not isinstance(one, FakeTensor)]
    return "\n".join((digest_of(step, (stage.name.partition(":")[0],)), *sorted(state), *values))


def digest_of(step: StepGraph, modules: tuple[str, ...] = ()) -> str:
    """Of the graphs of ``step``, and of what goes in and out; ``modules`` register operators of theirs."""
    ends = repr((sorted(step.inputs.items()), sorted(step.outputs.items())))
    try:
        graphs = [digest(encode(graph.graph, graph, modules)) for _, graph in sorted(step.graphs.items())]
    except PassError:  # what no rank can be sent, which a transformation behind it may take out again
        graphs = [str(graph.graph) for _, graph in sorted(step.graphs.items())]
    return "\n".join((*graphs, ends))


def _run(stage: TransformStage, step: StepGraph, state: State) -> StepGraph:
    # Only the arguments are tried: a TypeError of the call itself is the transformation's own, and is named as such.
    try:
        signature(stage.function).bind(step, state, **stage.args)
    except TypeError as error:
        raise PlanError(f"{stage.where}: {error}; its args are its keyword arguments") from None
    has = {
        "roles": step.has_roles,
        "optimizer": any(value.role == "param" for values in step.outputs.values() for value in values),
    }
    if missing := next((need for need in traits_of(stage.function).needs if not has[need]), None):
        raise PassError(f"{stage.where} needs {_NEEDS[missing]}")
    mine = replace(step, graphs={phase: own_copy(module) for phase, module in step.graphs.items()})
    with _naming(stage), naming_user_frame(lambda: stage.where):
        after = stage.function(mine, state, **stage.args)
    refuse_unpaired(stage.where, step, after, state)
    # Who changes a graph in place may have left the module with the code of before.
    for graph_module in after.graphs.values():
        graph_module.recompile()
    return after


@contextmanager
def _naming(stage: TransformStage) -> Iterator[None]:
    """Let errors for people begin with the place that asks for the transformation."""
    # One of ours begins its errors with its name, which ``where`` ends with: once is enough.
    try:
        yield
    except FxbucketError as error:
        if stage.where in str(error):
            raise
        raise type(error)(f"{stage.where}: {str(error).removeprefix(f'{stage.name}: ')}") from error
