"""What a transformation of a step says of itself, and what it tells of its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
Need = Literal["roles", "optimizer"]
BUCKET = "bucket"
"""The name under which the pass stands among transformations."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a transformation needs, where it may stand, and what it may change."""

    needs: tuple[Need, ...] = ()
    """What the step must have: ``roles`` of inputs and outputs, the update of an ``optimizer``."""
    after: tuple[str, ...] = ()
    """Names of transformations that must come before it, where a plan has both; ``bucket`` is the pass."""
    before: tuple[str, ...] = ()
    """Names of those that must come after it."""
    keeps_collectives: bool = True
    """Whether each collective carries what it carried before; else only what was gathered and reduced must still be."""
    rounds: str = ""
    """How results are rounded otherwise than before, as a clause; empty: all bits are the same."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a transformation says it did. Checks never believe it; people read it."""

    transformation: str
    done: tuple[str, ...] = ()
    """A clause for each thing that was changed."""
    left: tuple[tuple[str, str], ...] = ()
    """(what was not changed, why)."""


def transformation(
    *,
    needs: Sequence[Need] = (),
    after: Sequence[str] = (),
    before: Sequence[str] = (),
    keeps_collectives: bool = True,
    rounds: str = "",
) -> Callable[[_F], _F]:
    """Mark a ``callable(step: StepGraph, state: dict[str, Tensor], **args) -> StepGraph`` with its :class:`Traits`.

    The step's graphs are its own to change; ``state`` has the first tensors of state that transformations added. A callable
    without the mark has the traits of ``Traits()``.
    """

    def mark(function: _F) -> _F:
        function.fxbucket_traits = Traits(tuple(needs), tuple(after), tuple(before), keeps_collectives, rounds)  # type: ignore[attr-defined]  # the mark
        return function

    return mark


def traits_of(function: Callable[..., Any]) -> Traits:
    """The marked traits of ``function``, also of a ``functools.partial`` of it."""
    found = getattr(getattr(function, "func", function), "fxbucket_traits", None)
    return found if isinstance(found, Traits) else Traits()
