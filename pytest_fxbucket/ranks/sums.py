"""In which order the ranks' addends are added: in rank order, unless the job at hand asks for another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pytest_fxbucket.ranks.arithmetic import Operation, in_rank_order


class Sums(Protocol):
    """How the addends of all ranks become one tensor."""

    def __call__(
        self, parts: Sequence[torch.Tensor], operation: Operation, ranks: Sequence[int], owner: int | None
    ) -> torch.Tensor:
        """Combine ``parts``, flat and of one dtype, one of each of the group's ``ranks``; ``parts`` may be written.

        ``owner`` is the place in the group of the rank that gets the result; None: all do.
        """
        ...


_now: Sums = in_rank_order


def add_by(sums: Sums = in_rank_order) -> None:
    """From now on launches of this process add by ``sums``; a rank's next job begins in rank order again."""
    global _now
    _now = sums


def current() -> Sums:
    """How a launch at hand is to add, also when that is done later."""
    return _now
