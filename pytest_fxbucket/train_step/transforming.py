"""Transformations of a traced step, which run once a trace; :class:`Crossing` follows work that they move to the next call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.capture.model import fake_twin
from pytest_fxbucket.capture.names import names_of
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.iterations import Iterating
from pytest_fxbucket.step.roles import Parameter, StepGraph
from pytest_fxbucket.train_step.live import Live, LiveValues
from pytest_fxbucket.train_step.trace import TracedCall
from pytest_fxbucket.transforms.fit import refuse_unpaired
from pytest_fxbucket.transforms.registry import Transform, TransformStage, refuse_order, run_stages


@dataclass(frozen=True)
class StepAfterTransforms:
    """A step after all transformations."""

    step: StepGraph
    added: Mapping[str, torch.Tensor]
    """State that transformations added, by name, with its first values."""
    removed: Mapping[str, torch.Tensor]
    """A fake tensor for each state that transformations took out, by name."""


def described(traced: TracedCall, live: Live) -> StepGraph:
    """Describe a traced step as transformations get it: one graph, "joint", of this rank, without a mesh."""
    names, parameters = names_of(live.model), []
    places = {name: place for place, name in enumerate(names)}
    for fqn, tensor in live.params.items():
        aliases, shape = tuple(alias for alias, first in names.items() if first == fqn != alias), tuple(tensor.shape)
        placed = tuple(places[name] for name in (fqn, *aliases))
        held = tuple(live.stored[fqn].shape)
        parameters.append(Parameter(fqn, aliases, shape, held, tensor.dtype, tensor.requires_grad, shape, places=placed))
    return StepGraph(
        graphs={"joint": traced.graph_module},
        inputs={"joint": traced.inputs},
        outputs={"joint": traced.outputs},
        parameters=tuple(parameters),
        modules=tuple(fqn for fqn, _ in live.model.named_modules()),
        mesh=(),
        rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
    )


def transformed(
    step: StepGraph, states: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor], transforms: Sequence[Transform]
) -> StepAfterTransforms:
    """Run ``transforms`` one after the other on ``step``.

    ``states`` has the tensors of all state by name. ``shared`` has the state that earlier traces added, which keeps its values.
    Raises :class:`CaptureError` if a transformation fails, or leaves a step whose inputs and outputs do not match its state.
    """
    begin = {value.fqn: states[value.fqn] for value in step.inputs["joint"] if value.role == "state"}
    state = dict(begin)
    stages = [_stage(transform) for transform in transforms]
    refuse_order(stages)
    staged = run_stages(stages, step, state)
    # State that an earlier trace added has been trained since: it takes the place of the first values that this trace made, and
    # must still fit the step.
    known = {fqn: shared[fqn] for fqn in state if fqn in shared and fqn not in begin}
    state.update(known)
    if known:
        refuse_unpaired(stages[-1].where, step, staged[-1].step, state)
    step = staged[-1].step if staged else step
    for graph_module in step.graphs.values():
        graph_module.recompile()
    added = {fqn: tensor for fqn, tensor in state.items() if fqn not in begin}
    removed = {fqn: fake_twin(FakeTensorMode(), tensor) for fqn, tensor in begin.items() if fqn not in state}
    return StepAfterTransforms(step, added, removed)


def _stage(transform: Transform) -> TransformStage:
    function = getattr(transform, "func", transform)  # of a partial
    name = getattr(function, "__qualname__", type(function).__name__)
    return TransformStage(name, f"transform {name}", transform)


def iterating_of(step: StepGraph, traced: TracedCall, crossing: Crossing | None) -> Iterating | None:
    """The runner of a ``step`` whose work crosses iterations, None for any other; ``traced`` is what was transformed.

    Raises :class:`CaptureError` for a transform that is not marked as crossing, and for gradients that are summed over calls.
    """
    if "cleanup" not in step.graphs:
        return None
    if crossing is None:
        raise CaptureError(
            "a transform gave set-up, steady and clean-up graphs and did not say so; mark it with "
            "@transformation(crosses_iterations=True)"
        )
    late = [value.fqn for value in step.outputs["cleanup"] if value.role in ("param", "grad")]
    if kept := next((fqn for fqn in late if fqn in traced.gradients and fqn not in traced.cleared), None):
        raise CaptureError(
            f"the step looks at the gradient of {kept} that was there before, which is a call late where its reduction moves; "
            "begin it with zero_grad()"
        )
    return Iterating(step.graphs, step.inputs, step.outputs)


class Crossing:
    """Follows a step whose work crosses iterations: the work that the last call left, and whether it can still be done."""

    def __init__(self) -> None:
        self._left: Iterating | None = None
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}
        """Version counter and address of each parameter and state that is a call behind, as the last call left them."""

    def step(
        self, iterating: Iterating, take: Callable[[], LiveValues], cleared: Sequence[str]
    ) -> tuple[LiveValues, dict[str, Any]]:
        """Run a step of ``iterating``; if the last call was of another one, finish that first.

        ``take`` looks up the present values. Gives the values that the step took, and its results by name. Raises
        :class:`CaptureError` if somebody wrote to a tensor that is a call behind; nothing is changed then.
        """
        values = take()
        self._refuse_changed(values)
        if self._left is not None and self._left is not iterating:
            self.finish(take)
        results = iterating.step(values.gather)
        given = values.write([value for value, _ in results], [made for _, made in results], cleared)
        self._left = iterating
        behind = {value.key: values.find(value.role, value.fqn) for value in iterating.behind}
        self._seen = {key: (tensor._version, tensor.data_ptr()) for key, tensor in behind.items() if tensor is not None}
        return values, given

    def finish(self, take: Callable[[], LiveValues]) -> None:
        """Do what is left, if anything is. Raises as :meth:`step` does."""
        if self._left is None:
            return
        values = take()
        self._refuse_changed(values)
        results = self._left.rest(values.gather)
        values.write([value for value, _ in results], [made for _, made in results], ())
        self._left.forget()
        self._left = None
        self._seen.clear()

    def _refuse_changed(self, values: LiveValues) -> None:
        # A write in place raises the version; another tensor in its place has another address.
        for (role, fqn), (version, pointer) in self._seen.items():
            found = values.find(role, fqn)
            if found is None or (found._version, found.data_ptr()) != (version, pointer):
                what = "parameter" if role == "param" else role
                raise CaptureError(
                    f"{what} {fqn} was changed between two calls, while its update of the last one is still to come; make the "
                    "call before with last_step=True"
                )
