"""A plan's model, built by its factory as ordinary code: every value real, until parameters become too many to hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_fxbucket.capture.blame import blamed, user_frame
from pytest_fxbucket.compat import trace
from pytest_fxbucket.compat.valueless import computing_without_values, on_registration
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode

MOST_BYTES = 1 << 30
"""Parameters above it have no memory from the moment that a module gets them; before it they are real."""


def build(factory: Callable[..., Any], args: Mapping[str, Any], name: str) -> nn.Module:
    """What ``factory``, called ``name`` in the plan, gives for ``args``; parameters beyond :data:`MOST_BYTES` are fake tensors.

    Initialisers of those do nothing; all else in the factory runs as anywhere. Raises :class:`CaptureError` for what the
    factory raises, for code that reads the value of a parameter without memory, and for what is no module.
    """
    with ExitStack() as inside:
        held = _Held(inside)
        inside.enter_context(on_registration(held.given))
        with blamed(lambda: f"[model] factory {name}"):
            try:
                built = factory(**args)
            except Exception as error:
                if held.mode is None or trace.untraceable(error) is None:
                    raise
                raise CaptureError(_reads_value(name, user_frame(error))) from error
    if not isinstance(built, nn.Module):
        raise CaptureError(f"[model] factory {name} gave a value of type {type(built).__name__}, expected a torch.nn.Module")
    return built


def _reads_value(name: str, frame: str) -> str:
    where = f" at {frame}" if frame else ""
    return (
        f"[model] factory {name} reads the value of a parameter{where}, but beyond {MOST_BYTES >> 30} GiB parameters are built "
        "without values; make it of numbers or buffers, or give the plan a smaller model ([model] args)"
    )


class _Held:
    """Counts the bytes of parameters as modules get them."""

    def __init__(self, inside: ExitStack) -> None:
        self.mode: FakeTensorMode | None = None
        """Of parameters without memory; None as long as there are none."""
        self._inside, self._bytes = inside, 0
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}
        """By identity a parameter that was real, and what stands for it if it is not held."""

    def given(self, module: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """What ``module`` gets where ``parameter`` is put in its place."""
        if trace.is_fake(parameter) or parameter.is_meta:
            return parameter
        known = self._known.get(id(parameter))
        if known is None or known[0]() is not parameter:
            self._bytes += parameter.untyped_storage().nbytes()
            known = weakref.ref(parameter), self._twin(parameter) if self._bytes > MOST_BYTES else None
            self._known[id(parameter)] = known
        return parameter if known[1] is None else known[1]

    def _twin(self, parameter: torch.Tensor) -> torch.Tensor:
        from pytest_fxbucket.capture.twins import fake_twin

        if self.mode is None:
            self.mode = self._inside.enter_context(computing_without_values())
        return fake_twin(self.mode, parameter)
