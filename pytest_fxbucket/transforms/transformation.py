"""The traits that a transformation of a step declares, and the decorator that declares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from pytest_fxbucket.errors import PlanError

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
    """Names of transformations that must come after it."""
    keeps_collectives: bool = True
    """Whether each collective carries what it carried before; else some graph must still gather or reduce each parameter so."""
    rounds: str = ""
    """How results are rounded otherwise than before, as a clause; empty: all bits are the same."""
    crosses_iterations: bool = False
    """Whether it gives set-up, steady and clean-up graphs: a captured step takes ``last_step`` then."""


def transformation(
    *,
    needs: Sequence[Need] = (),
    after: Sequence[str] = (),
    before: Sequence[str] = (),
    keeps_collectives: bool = True,
    rounds: str = "",
    crosses_iterations: bool = False,
) -> Callable[[_F], _F]:
    """Mark a ``callable(step: StepGraph, state: dict[str, Tensor], **args) -> StepGraph`` with its :class:`Traits`.

    The step's graphs are its own to change; ``state`` has the first tensors of state that transformations added. A callable
    without the mark has the traits of ``Traits()``. Raises PlanError for one name instead of several, and for unknown needs.
    """

    for key, several in (("needs", needs), ("after", after), ("before", before)):
        if isinstance(several, str):
            raise PlanError(f"@transformation: {key} is {several!r}, expected a list of names, [{several!r}]")
    if foreign := next((need for need in needs if need not in get_args(Need)), None):
        raise PlanError(f"@transformation: needs names {foreign!r}, expected {' or '.join(get_args(Need))}")

    def mark(function: _F) -> _F:
        traits = Traits(tuple(needs), tuple(after), tuple(before), keeps_collectives, rounds, crosses_iterations)
        function.fxbucket_traits = traits  # type: ignore[attr-defined]  # the mark
        return function

    return mark


def traits_of(function: Callable[..., Any]) -> Traits:
    """The marked traits of ``function``, also of a ``functools.partial`` of it."""
    found = getattr(getattr(function, "func", function), "fxbucket_traits", None)
    return found if isinstance(found, Traits) else Traits()
