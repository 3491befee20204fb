"""Random numbers in a traced step: code that goes back to an earlier state of the generator draws the same numbers again.

While a step is traced nothing is really drawn, so the generator's state says nothing. Here the state is a place on a tape of
draws: keeping it notes the place, and going back to it gives the same numbers again. Activation checkpointing goes back so in
backward (``torch.random.fork_rng``, ``torch.set_rng_state``), and so do reversible layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode, unseen
from pytest_fxbucket.errors import CaptureError


@contextmanager
def draws_on_tape() -> Iterator[None]:
    """While inside, and traced, torch's CPU generator is a tape.

    Raises :class:`CaptureError` for code that seeds it, or sets it to a state from elsewhere: a graph would not do that again;
    and for draws that name a generator, which no graph holds.
    """
    tape = _Tape()
    refused = {name: _refusing(name) for name in ("manual_seed", "seed")}
    default = _DefaultGenerator()
    seed = torch.default_generator.initial_seed
    vars(default).update(get_state=tape.state, set_state=tape.go_to, initial_seed=seed, **refused)
    with ExitStack() as inside:
        for module in (torch, torch.random):
            inside.enter_context(patch.object(module, "get_rng_state", tape.state))
            inside.enter_context(patch.object(module, "set_rng_state", tape.go_to))
            inside.enter_context(patch.object(module, "default_generator", default))
            for name, refuse in refused.items():
                inside.enter_context(patch.object(module, name, refuse))
        inside.enter_context(tape)
        yield


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: object) -> None:
        raise CaptureError(
            f"the step calls torch.{name}, which seeds the random generator in every step, and a graph would not do it again; "
            "seed once before training, or draw from what the batch brings"
        )

    return refuse


class _DefaultGenerator(torch.Generator):
    """Stands for torch's own, whose methods cannot be replaced."""


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[tuple[Any, str, torch.Tensor]] = []
        """Operator, form of its arguments, and copy of what it drew, in order of first draws."""
        self._place = 0
        """Place of the next draw."""
        self._states: dict[int, tuple[torch.Tensor, int]] = {}
        """Each tensor that was given as a state, and its place, by the tensor's identity."""

    def state(self) -> torch.Tensor:
        """What stands for the generator's state."""
        with unseen():
            # Only its identity counts. It is made unseen, so that it becomes no node of the graph.
            given = torch.empty(0, dtype=torch.uint8)
        self._states[id(given)] = given, self._place
        return given

    def go_to(self, state: torch.Tensor) -> None:
        """Draw again from the place of ``state``."""
        if id(state) not in self._states:
            raise CaptureError(
                "the step sets torch's random generator to a state that it did not take itself, and a graph would not do it "
                "again; set it between steps"
            )
        self._place = self._states[id(state)][1]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is not None:
            raise CaptureError(
                "the step draws by a generator that it names (generator = ...), which no graph holds; leave it out, by which "
                "torch's own draws, or draw outside of the step"
            )
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        # At the end of the tape this is a first draw, which is put on the tape. Before the end it is a draw once more, and the
        # graph has a copy of what was drawn first instead of a second draw.
        place, self._place = self._place, self._place + 1
        if place == len(self._drawn):
            given = func(*args, **kwargs)
            self._drawn.append((func, _form(args, kwargs), _copied(given)))
            return given
        return self._again(place, func, args, kwargs)

    def _again(self, place: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        drawer, form, drawn = self._drawn[place]
        in_place = func._schema.is_mutable
        # Only of an operator with an underscore is it known that it writes its first argument, where the copy can be put.
        if drawer is not func or (in_place and not str(func).partition(".")[2].partition(".")[0].endswith("_")):
            raise CaptureError(
                f"the step goes back to an earlier state of torch's random generator and then draws by {func}, where it first "
                f"drew by {drawer}; draw the same numbers in the same order, by operators that give them back"
            )
        if form != _form(args, kwargs):
            raise CaptureError(
                f"the step goes back to an earlier state of torch's random generator and then draws by {func} with other "
                "sizes, dtypes or numbers than first, which gives other values; draw the same, or draw outside of the step"
            )
        return args[0].copy_(drawn) if in_place else _copied(drawn)


def _form(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """All that decides what is drawn but the values of tensors, which one that is computed again has again."""
    said = pytree.tree_map(
        lambda value: (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else value,
        (args, dict(sorted(kwargs.items()))),
    )
    return repr(said)


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``func`` draws from the default generator. Attention, always tagged, draws only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return False
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return all(given.get(a.name, a.default_value) != 0.0 for a in func._schema.arguments if a.name == "dropout_p")


def _copied(drawn: Any) -> Any:
    """Copies, since the original may be written in place later. A copy that nobody draws again is dead code in the graph."""
    return pytree.tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, drawn)
