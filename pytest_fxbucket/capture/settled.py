"""A step whose forward changes Python state: a graph does not do it again, so it must make no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from pytest_fxbucket.capture.pictures import GENERATOR, generators, is_number, state_of
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.portable import digest, encode_module

if TYPE_CHECKING:
    from torch import fx, nn


class TracedFunction(Protocol):
    """What was traced."""

    def run_alone(self) -> None:
        """Run the model by itself, not traced."""


StepT = TypeVar("StepT", bound=TracedFunction)


def trace_settled(model: nn.Module, trace: Callable[[], tuple[StepT, fx.GraphModule]]) -> tuple[StepT, fx.GraphModule]:
    """What ``trace`` gives of ``model``; traced twice if forward changes attributes, or variables of the model's modules.

    Raises :class:`CaptureError` if that makes another graph the second time, or may later: for random generators of Python and
    numpy, and for numbers that change from call to call.
    """
    before = state_of(model)
    first = trace()
    after = state_of(model)
    changed = [where for where in after if before.get(where) != after[where]]
    if not changed:
        return first
    _refuse_drawing(changed, after, model, first[0].run_alone)
    try:
        second = trace()
    except CaptureError as error:
        raise CaptureError(f"{_kept(changed[0])}: the second step cannot be traced, since {error}") from error
    later = state_of(model)
    for where in changed:
        if is_number(after[where]) and later.get(where) != after[where]:
            raise CaptureError(
                f"{where} changes from call to call in forward, and a graph would keep its first value; count in a buffer "
                "(register_buffer, and add_ in forward), or outside of forward"
            )
    if digest(encode_module(first[1])) != digest(encode_module(second[1])):
        raise CaptureError(f"{_kept(changed[0])}: the second step is another one than the first")
    return first


def _kept(where: str) -> str:
    return (
        f"{where} is set in forward and read in the next one, which a graph cannot do; keep it in a buffer that forward writes "
        "in place"
    )


def _refuse_drawing(changed: list[str], after: dict[str, object], model: nn.Module, run: Callable[[], object]) -> None:
    for where in changed:
        picture = after[where]
        if where in generators():
            fqn = _who_changes(where, model, run)
            raise CaptureError(
                f"{f'module {fqn}' if fqn else 'the root module or the loss'} draws from {where} in forward, and a graph would "
                "have the same number in every step; draw with torch (torch.rand, and torch.where instead of if)"
            )
        if isinstance(picture, tuple) and picture[0] is GENERATOR:
            raise CaptureError(
                f"{where} is a random generator that forward draws from, and a graph would have the same numbers in every "
                "step; draw with torch's own (torch.rand, and torch.where instead of if)"
            )


def _who_changes(where: str, model: nn.Module, run: Callable[[], object]) -> str:
    """FQN of the innermost module in whose forward the generator called ``where`` changes."""
    found: list[str] = []
    begun: list[object] = []
    handles = []

    def leave(fqn: str) -> None:
        if begun.pop() != generators()[where] and not found:
            found.append(fqn)

    for fqn, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_: begun.append(generators()[where])))
        handles.append(module.register_forward_hook(lambda *_, fqn=fqn: leave(fqn)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""
