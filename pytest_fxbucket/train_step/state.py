"""State of optimizers that a graph needs and that is not there yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.optimizers.state import make_state
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step.trace import refuse_first_step

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.capture.roles import Value
    from pytest_fxbucket.train_step.live import Live


class Making:
    """Makes the state of one call, and can put the optimizers' state back to what it was before.

    ``removed``: state that transformations took out; it is not made again. ``added``: what they put in.
    """

    def __init__(self, live: Live, removed: Mapping[str, Any], added: Collection[str]) -> None:
        self._live, self._removed, self._added = live, removed, added
        self._before: dict[str, dict[str, Any]] = {}

    def make(self, inputs: Iterable[Value]) -> None:
        """Make what ``inputs`` need. Raises :class:`CaptureError` for a parameter that has only a part of its state."""
        there = self._live.states()
        missing = [v.fqn for v in inputs if v.role == "state" and v.fqn not in there and v.fqn not in self._added]
        wanted = dict.fromkeys(name.rpartition(".")[0] for name in missing if name not in self._removed)
        if not wanted:
            return
        for name in missing:
            self._refuse_partial(name)
        for optimizer in self._live.optimizers:
            own = [fqn for fqn in wanted if self._live.owners[fqn] is optimizer]
            if own:
                self._make(optimizer, own)

    def drop(self, names: Iterable[str]) -> None:
        """Take state out of the optimizers."""
        for name in names:
            fqn, _, key = name.rpartition(".")
            if fqn in self._live.owners:
                self._remember([fqn])
                self._live.owners[fqn].state[self._live.params[fqn]].pop(key, None)

    def undo(self) -> None:
        """Put everything back."""
        for fqn, state in self._before.items():
            held = self._live.owners[fqn].state
            if state:
                held[self._live.params[fqn]] = state
            else:
                held.pop(self._live.params[fqn], None)
        self._before.clear()

    def _make(self, optimizer: torch.optim.Optimizer, fqns: Sequence[str]) -> None:
        refuse_first_step(optimizer)
        self._remember(fqns)
        make_state([optimizer], [self._live.params[fqn] for fqn in fqns])
        self.drop(name for name in self._removed if name.rpartition(".")[0] in fqns)

    def _remember(self, fqns: Iterable[str]) -> None:
        for fqn in fqns:
            self._before.setdefault(fqn, dict(self._live.state_of(fqn, self._live.owners[fqn])))

    def _refuse_partial(self, name: str) -> None:
        fqn, _, key = name.rpartition(".")
        owner = self._live.owners[fqn]
        if self._live.state_of(fqn, owner):
            raise CaptureError(
                f"parameter {fqn} has state in the optimizer {type(owner).__name__}, but no {key}; "
                "load a state_dict that has it"
            )
