"""Process groups by the names that drawn graphs use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from pytest_fxbucket.compat.c10d import fake_world, named_groups

Groups = Mapping[str, Sequence[Sequence[int]]]
"""By the name that graphs use: who talks to whom. Each rank is in one list of each name; the lists are of one length."""
HALVES: dict[int, Groups] = {
    2: {"halves": [[0], [1]], "strided": [[0], [1]]},
    4: {"halves": [[0, 1], [2, 3]], "strided": [[0, 2], [1, 3]]},
}
"""Groups of half the ranks: neighbours, and every other one, so that a rank's index in its group is not its number."""


@contextmanager
def fake_groups(world: int, groups: Groups | None = None, rank: int = 0) -> Iterator[None]:
    """This process as ``rank`` of fake ranks whose process groups have the names that graphs use, as a pass finds them."""
    with ExitStack() as inside:
        inside.enter_context(fake_world(rank, world))
        inside.enter_context(named_groups(groups or {}, rank))
        yield


def members_of(world: int, groups: Groups, rank: int) -> dict[str, tuple[int, ...]]:
    """Ranks of each group that ``rank`` is in, by name, with ``"0"``, all of ``world``."""
    lists: Groups = {"0": [list(range(world))], **groups}
    return {name: next(tuple(ranks) for ranks in parts if rank in ranks) for name, parts in lists.items()}
