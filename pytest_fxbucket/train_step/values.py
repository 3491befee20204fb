"""Reads the inputs of one call from where the user keeps them, and writes the results back there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.storage import storage_key
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step.live import rate_tensor

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Value
    from pytest_fxbucket.train_step.live import Live
    from pytest_fxbucket.train_step.signature import Arguments


class Values:
    """Everything a graph may ask for in one call, by role and name."""

    def __init__(self, arguments: Arguments, live: Live, added: Mapping[str, torch.Tensor]) -> None:
        self._live = live
        self._rates = live.rates()
        self._of: dict[str, Mapping[str, Any]] = {
            "param": live.params,
            "buffer": live.buffers,
            "grad": {fqn: parameter.grad for fqn, parameter in live.params.items() if parameter.grad is not None},
            "state": {**added, **live.states()},
            "hyper": {fqn: rate_tensor(rate) for fqn, rate in self._rates.items()},
            "batch": arguments.tensors(),
        }
        self._taken: dict[tuple[str, str], torch.Tensor] = {}

    def own(self, value: Value) -> Any:
        """The user's own object that an input was made of."""
        return self._rates[value.fqn] if value.role == "hyper" else self._of[value.role][value.fqn]

    def find(self, role: str, fqn: str) -> torch.Tensor | None:
        """The tensor of a parameter, buffer or state as it is; None if it is gone."""
        return self._of[role].get(fqn)

    def gather(self, inputs: Iterable[Value]) -> list[torch.Tensor]:
        """Tensors for the graph. Raises :class:`CaptureError` for one that is missing or has another shape or dtype."""
        for value in inputs:
            found = self._of[value.role].get(value.fqn)
            if found is None:
                raise CaptureError(
                    f"{value.role} {value.fqn} is missing, which a transform added; load it into the state of the captured step"
                )
            if (tuple(found.shape), found.dtype) != (value.shape, value.dtype):
                raise CaptureError(
                    f"{value.role} {value.fqn} has shape {tuple(found.shape)} and dtype {found.dtype}, but the step was traced "
                    f"with shape {value.shape} and dtype {value.dtype}; load what fits"
                )
            self._taken[value.role, value.fqn] = found
        return list(self._taken.values())

    def write(self, outputs: Iterable[Value], results: Sequence[Any], cleared: Iterable[str]) -> dict[str, Any]:
        """Write new values into the user's own tensors, in place. Gives the other results by name."""
        given: dict[str, Any] = {}
        targets: list[torch.Tensor] = []
        news: list[torch.Tensor] = []
        for value, result in zip(outputs, results, strict=True):
            target = self._taken.get((value.role, value.fqn))
            if target is not None:
                targets.append(target)
                news.append(result)
            elif value.role == "grad":
                self._live.params[value.fqn].grad = result
            else:
                given[value.fqn] = result
        _copy(targets, news)
        for fqn in cleared:
            self._live.params[fqn].grad = None
        return given


def _copy(targets: Sequence[torch.Tensor], news: Sequence[torch.Tensor]) -> None:
    """All at once: a new value that lives where another is to be written is kept safe."""
    written = {storage_key(target) for target in targets}
    with torch.no_grad():
        safe = [new.clone() if storage_key(new) in written else new for new in news]
        if safe:
            torch._foreach_copy_(list(targets), safe)
