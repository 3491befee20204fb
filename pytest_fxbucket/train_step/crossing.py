"""Calls of a captured step whose work crosses iterations: what the last one left, and whether that still fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.iterating import Iterating

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fxbucket.capture.roles import StepGraph
    from pytest_fxbucket.train_step.trace import Traced
    from pytest_fxbucket.train_step.values import Values


def iterating_of(step: StepGraph, traced: Traced, crossing: Crossing | None) -> Iterating | None:
    """The graphs of ``step`` if its work crosses iterations; ``traced`` says which gradients of before matter.

    Raises :class:`CaptureError` for a transform that did not say so, and for gradients that are added up over calls.
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
    """What the last call of a captured step left to the next one."""

    def __init__(self) -> None:
        self._left: Iterating | None = None
        self._seen: dict[tuple[str, str], tuple[torch.Tensor, int, int]] = {}
        """Parameters and state that are behind, each with its version, how often it was written, and where it lies."""

    def step(self, iterating: Iterating, take: Callable[[], Values], cleared: Sequence[str]) -> tuple[Values, dict[str, Any]]:
        """Run a step of ``iterating``, and what is left of another signature before; ``take`` gives values as they are now.

        Gives the values that it was given, and what it gives back to the caller. Raises :class:`CaptureError` if somebody wrote
        to what is behind; nothing is changed then.
        """
        values = take()
        self._refuse_written(values)
        if self._left is not None and self._left is not iterating:
            self.finish(take)
        results = iterating.step(values.gather)
        given = values.write([value for value, _ in results], [made for _, made in results], cleared)
        self._left = iterating
        self._remember(iterating, values)
        return values, given

    def finish(self, take: Callable[[], Values]) -> None:
        """Do what is left, if anything is."""
        if self._left is None:
            return
        values = take()
        results = self._left.rest(values.gather)
        values.write([value for value, _ in results], [made for _, made in results], ())
        self._left.forget()
        self._left = None
        self._seen.clear()

    def _remember(self, iterating: Iterating, values: Values) -> None:
        self._seen = {(v.role, v.fqn): (own := values.own(v), own._version, own.data_ptr()) for v in iterating.behind}

    def _refuse_written(self, values: Values) -> None:
        for (role, fqn), (tensor, version, pointer) in self._seen.items():
            found = values.find(role, fqn)
            if found is not tensor or (found._version, found.data_ptr()) != (version, pointer):
                what = "parameter" if role == "param" else role
                raise CaptureError(
                    f"{what} {fqn} was changed between two calls, while its update of the last one is still to come; make the "
                    "call before with last_step=True"
                )
