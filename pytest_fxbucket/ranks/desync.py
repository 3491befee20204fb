"""Did all ranks launch the same collectives on each process group? If not: where they part, and who is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_fxbucket.ranks.flight_recorder import RankPosition, RecordedGroup, RecordedLaunch, ranks_text

# A group of a rank: its members, and which of the rank's groups with these members it is.
_Key = tuple[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Desync:
    """The first collective of one group that not all members launched alike. ``rank``: one of those that differ from most.

    ``is_missing``: some members did not launch it at all, as when they failed before; the others agree.
    """

    rank: int
    sentence: str
    is_missing: bool


def agree(groups: Mapping[int, Sequence[RecordedGroup]]) -> bool:
    """Whether the ranks (rank -> its groups) launched the same on every group that they share, by counts and checksums."""
    keys = {rank: _keys(own) for rank, own in groups.items()}
    seen: dict[_Key, tuple[int, int]] = {}
    # The first rank of a group says what all its members must have said.
    for rank, own in groups.items():
        for key, index in keys[rank].items():
            said = (own[index].count, own[index].checksum)
            if rank in key[0] and seen.setdefault(key, said) != said:
                return False
    # A member that never made a group agrees as long as nothing was launched on it. Members that are not here do not count.
    return all(not count or key in keys[rank] for key, (count, _) in seen.items() for rank in key[0] if rank in groups)


def desyncs(places: Mapping[int, RankPosition]) -> list[Desync]:
    """Where the ranks part, at most one place for each group; ranks that left no flight record are not in ``places``."""
    keys = sorted({key for where in places.values() for key in _keys(where.groups)})
    return [desync for key in keys for desync in _on_group(key, places)]


def wait_for_ever(places: Mapping[int, RankPosition], running: Sequence[int]) -> bool:
    """Whether each of ``running`` waits for a collective that some member has not launched, so that none of them can go on."""
    return bool(running) and all(rank in places and _lacks_a_member(places[rank], places) for rank in running)


def _lacks_a_member(where: RankPosition, places: Mapping[int, RankPosition]) -> bool:
    if where.at is None or not where.waits:
        return False
    key = next(key for key, index in _keys(where.groups).items() if index == where.at.group)
    return any(_launches(places[rank], key)[0] <= where.at.index for rank in key[0] if rank in places)


def _on_group(key: _Key, places: Mapping[int, RankPosition]) -> Iterator[Desync]:
    launched = {rank: _launches(places[rank], key) for rank in key[0] if rank in places}
    # The ring keeps the last launches only: those before the first that all ranks still have cannot be compared.
    first = max((count - len(launches) for count, launches in launched.values()), default=0)
    for index in range(first, max((count for count, _ in launched.values()), default=0)):
        said = {rank: launches.get(index) for rank, (_, launches) in launched.items()}
        if len({launch.agreed if launch is not None else "" for launch in said.values()}) > 1:
            yield _desync(said, index, key[0])
            return


def _desync(said: Mapping[int, RecordedLaunch | None], index: int, members: tuple[int, ...]) -> Desync:
    missing = tuple(rank for rank, launch in said.items() if launch is None)
    there = {rank: launch.agreed for rank, launch in said.items() if launch is not None}
    where = f"collective {index + 1} of the job on {ranks_text(members)}"
    # What the fewest ranks launched is named first: they are the odd ones out.
    counts = Counter(there.values())
    whats = sorted(counts, key=lambda what: (counts[what], min(rank for rank, one in there.items() if one == what)))
    parts = [f"{_of(there, what)} launched {what}" for what in whats]
    if len(whats) == 1:
        return Desync(missing[0], f"{ranks_text(missing)} never launched {where}; {parts[0]}", is_missing=True)
    first = min(rank for rank, one in there.items() if one == whats[0])
    parts += [f"{ranks_text(missing)} launched none"] * bool(missing)
    return Desync(first, f"the ranks part at {where}: {', '.join(parts)}", is_missing=False)


def _of(there: Mapping[int, str], what: str) -> str:
    return ranks_text(tuple(rank for rank, one in there.items() if one == what))


def _keys(groups: Sequence[RecordedGroup]) -> dict[_Key, int]:
    seen: Counter[tuple[int, ...]] = Counter()
    keys = {}
    for index, group in enumerate(groups):
        # A rank may have several groups of the same members, which all members make in one order.
        keys[group.members, seen[group.members]] = index
        seen[group.members] += 1
    return keys


def _launches(where: RankPosition, key: _Key) -> tuple[int, dict[int, RecordedLaunch]]:
    """How many the rank launched on a group, and by number those that are still known."""
    index = _keys(where.groups).get(key)
    if index is None:
        return 0, {}
    return where.groups[index].count, {launch.index: launch for launch in where.launches if launch.group == index}
