"""Runs a step whose work crosses iterations: set-up first, steady from then on, clean-up when it is to be finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytest_fxbucket.step.roles import Phase, Value

CROSSING: tuple[Phase, ...] = ("setup", "steady", "cleanup")
"""Graphs of a step whose work crosses iterations."""
Take = Callable[[Sequence["Value"]], Sequence[torch.Tensor]]
"""Gives the tensors of inputs, none of which is carried, as they are now."""
Results = list[tuple["Value", Any]]
"""What a call gives, but for what it hands to the next one."""


class Iterating:
    """The three graphs of a step, and what its last call handed to the next.

    A call that raises changes nothing: the next one finds what this one found.
    """

    def __init__(
        self,
        graphs: Mapping[Phase, Callable[..., Any]],
        inputs: Mapping[Phase, Sequence[Value]],
        outputs: Mapping[Phase, Sequence[Value]],
    ) -> None:
        self._graphs, self._inputs, self._outputs = graphs, inputs, outputs
        self._carried: dict[str, Any] | None = None

    @property
    def pending(self) -> bool:
        """Whether the last call left work to the next one."""
        return self._carried is not None

    @property
    def behind(self) -> list[Value]:
        """Parameters and state that are one call behind as long as work is left."""
        return [value for value in self._outputs["cleanup"] if value.role in ("param", "state")]

    @property
    def phase(self) -> Phase:
        """The graph that the next call runs."""
        return "steady" if self.pending else "setup"

    def step(self, take: Take) -> Results:
        """Run one step: do the moved work of the step before first, and leave the moved work of this one to the next call.

        Results are new values of this step; those that the moved work makes are of the step before.
        """
        phase = self.phase
        with torch.no_grad():
            return self.take_results(phase, self._graphs[phase](*self.arguments(phase, take)))

    def arguments(self, phase: Phase, take: Take) -> list[Any]:
        """What the graph ``phase`` is to be called with."""
        inputs = self._inputs[phase]
        given = iter(take([value for value in inputs if value.role != "carried"]))
        carried = self._carried or {}
        return [carried[value.fqn] if value.role == "carried" else next(given) for value in inputs]

    def take_results(self, phase: Phase, made: Sequence[Any]) -> Results:
        """The results of a step whose graph ``phase`` gave ``made``; carried values are kept for the next call."""
        results = list(zip(self._outputs[phase], made, strict=True))
        # Only behind the call, so that one that raises leaves what was carried.
        self._carried = {value.fqn: one for value, one in results if value.role == "carried"}
        return [(value, one) for value, one in results if value.role != "carried"]

    def rest(self, take: Take) -> Results:
        """Do what the last step left, on parameters and state as they are behind it; :meth:`forget` says that it is done."""
        if not self.pending:
            return []
        with torch.no_grad():
            made = self._graphs["cleanup"](*self.arguments("cleanup", take))
        return list(zip(self._outputs["cleanup"], made, strict=True))

    def forget(self) -> None:
        """Nothing is left of the last step; the next one begins anew."""
        self._carried = None
