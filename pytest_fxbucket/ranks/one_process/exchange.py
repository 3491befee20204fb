"""Where the ranks of one process meet: each collective of each group, as its members come to it one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fxbucket.ranks.ledger import ranks_text


class CollectiveMismatch(RuntimeError):
    """A rank launched another collective than the first member of its group did."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a member says of a collective: `text` for people, `agreed` what all members must say alike."""

    text: str
    agreed: Hashable


class Exchange:
    """One collective of the group of `ranks`; `index` counts on it from 0, and is -1 where two ranks talk to each other."""

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self._ranks, self._index = tuple(ranks), index
        self._brought: dict[int, Any] = {}
        self._first: tuple[int, Said] | None = None
        self._result: Any = None
        self._is_done = False

    def join(self, member: int, said: Said, brought: object) -> None:
        """Come as number `member` of the group with what it sends. Raises CollectiveMismatch."""
        rank = self._ranks[member]
        if self._first is None:
            self._first = rank, said
        first, told = self._first
        if told.agreed != said.agreed:
            where = f"as collective {self._index + 1} on" if self._index >= 0 else "between"
            raise CollectiveMismatch(
                f"rank {rank} launched {said.text} {where} {ranks_text(tuple(sorted(self._ranks)))}, "
                f"where rank {first} launched {told.text}"
            )
        self._brought[member] = brought

    @property
    def is_whole(self) -> bool:
        """Whether all members have come."""
        return len(self._brought) == len(self._ranks)

    def result(self, compute: Callable[[list[Any]], Any]) -> Any:
        """`compute` of what the members sent, in the group's order: made once, for all.

        It is made at the first wait that finds all members here, and not before. A collective reads its inputs until its wait:
        a step that writes to one in between is wrong, and the later they are read, the more of such writes show in the values.
        By then the waiting rank has done all that it does before its wait: at least its write shows, and always the same way.
        """
        if not self._is_done:
            members = range(len(self._ranks))
            self._result = compute([self._brought[member] for member in members])
            self._brought = dict.fromkeys(members)
            self._is_done = True
        return self._result


@dataclass(slots=True)
class Table:
    """The exchanges under way of one group of `ranks`, by number; between two ranks by who talks to whom."""

    ranks: tuple[int, ...]
    under_way: dict[Hashable, Exchange] = field(default_factory=dict)

    def join(self, key: Hashable, members: tuple[int, ...], member: int, said: Said, brought: object) -> Exchange:
        """Come to the exchange `key` of `members` (numbers in the group) as `member`. Raises CollectiveMismatch."""
        index = key if isinstance(key, int) else -1
        if key not in self.under_way:
            self.under_way[key] = Exchange([self.ranks[one] for one in members], index)
        exchange = self.under_way[key]
        exchange.join(members.index(member), said, brought)
        if exchange.is_whole:
            del self.under_way[key]
        return exchange


class Tables:
    """A table for each group of the process, found by its members under the group's name and ranks."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, Table] = {}
        self._made: Counter[Hashable] = Counter()

    def sit_down(self, name: str, ranks: tuple[int, ...], member: int) -> Table:
        """The table of the group `name` for its number `member`; a group that is made again gets another."""
        made = (name, ranks, member)
        self._made[made] += 1
        return self._tables.setdefault((name, ranks, self._made[made]), Table(ranks))
