"""Which pipeline stage each traced node is of: a stage ends behind the one call of each module that is cut behind."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

STAGE = "fxbucket_stage"
"""Key of a node's stage; nodes of a trace without cuts have none."""
Call = tuple[int, int]
"""Place of the first node of a module's call, and of the first one behind it."""


class StageMarks:
    """Follows the calls of modules while a step is traced."""

    def __init__(self, cuts: Iterable[str] = ()) -> None:
        """``cuts`` are first FQNs of modules."""
        self.cuts = frozenset(cuts)
        self.stage = 0
        """The one that is traced."""
        self.calls: dict[str, list[Call]] = {}
        """By FQN of every module that ran, in order; of a trace without cuts none."""
        self._begun: list[int] = []

    def begin(self) -> None:
        """Be at the begin of a forward."""
        self.stage = 0

    def enter(self, place: int) -> None:
        """A module's call begins, with ``place`` nodes before it."""
        self._begun.append(place)

    def leave(self, fqn: str, place: int) -> None:
        """The call of ``fqn``, the last that began, ends."""
        self.calls.setdefault(fqn, []).append((self._begun.pop(), place))
        self.stage += fqn in self.cuts

    def put_on(self, node: fx.Node) -> None:
        """Mark ``node`` as of the stage that is traced."""
        if self.cuts:
            node.meta[STAGE] = self.stage


def first_names(model: nn.Module) -> dict[str, str]:
    """Every FQN of a module of ``model``, to its first one, by which its calls are named."""
    first = {id(module): fqn for fqn, module in model.named_modules()}
    return {fqn: first[id(module)] for fqn, module in model.named_modules(remove_duplicate=False)}
