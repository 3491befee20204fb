"""Did all ranks launch the same collectives on each process group, and receive what was sent? If not: where they part."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_fxbucket.ranks.flight_recorder import FROM_ANY, RankPosition, RecordedGroup, RecordedLaunch, ranks_text

# A group of a rank: its members, and which of the rank's groups with these members it is.
_Key = tuple[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Desync:
    """The first collective of one group that not all members launched alike, or a message that was not received as it was sent.

    ``rank``: one of those that differ from most. ``is_missing``: some members did not launch it at all, as when they failed
    before; the others agree.
    """

    rank: int
    sentence: str
    is_missing: bool


def agree(places: Mapping[int, RankPosition]) -> bool:
    """Whether ranks launched the same on all groups that they share, and received what was sent, by counts and checksums."""
    keys = {rank: _keys(where.groups) for rank, where in places.items()}
    seen: dict[_Key, tuple[int, int]] = {}
    # The first rank of a group says what all its members must have said.
    for rank, where in places.items():
        for key, index in keys[rank].items():
            said = (where.groups[index].count, where.groups[index].checksum)
            if rank in key[0] and seen.setdefault(key, said) != said:
                return False
    # A member that never made a group agrees as long as nothing was launched on it. Members that are not here do not count.
    return _all_received(places) and all(
        not count or key in keys[rank] for key, (count, _) in seen.items() for rank in key[0] if rank in places
    )


def desyncs(places: Mapping[int, RankPosition]) -> list[Desync]:
    """Where the ranks part, at most one place for each group, then for each rank that sends to another.

    Ranks that left no flight record are not in ``places``.
    """
    keys = sorted({key for where in places.values() for key in _keys(where.groups)})
    return [*(desync for key in keys for desync in _on_group(key, places)), *_of_messages(places)]


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


# Messages from one rank to another, which the two do not launch alike: the one sends what the other receives.


_MESSAGE = re.compile(r"(send to|receive from) rank (\d+)")
# By sender and receiver: how many messages of each size and dtype.
_Messages = dict[tuple[int, int], Counter[str]]


def _all_received(places: Mapping[int, RankPosition]) -> bool:
    members = {rank for where in places.values() for group in where.groups for rank in group.members}
    if not members <= places.keys():
        return True  # who is not here may have sent or received the rest
    return (sum(where.sent for where in places.values()) - sum(where.received for where in places.values())) % 2**64 == 0


def _of_messages(places: Mapping[int, RankPosition]) -> Iterator[Desync]:
    whole = all(sum(group.count for group in where.groups) == len(where.launches) for where in places.values())
    # Without the oldest launches, or with receivers that named no sender, nobody can tell which message it is.
    if _all_received(places) or not whole or any(one.kind == FROM_ANY for where in places.values() for one in where.launches):
        return
    sent, received = _messages(places)
    for pair in sorted(sent.keys() | received.keys()):
        over, due = sorted(sent[pair] - received[pair]), sorted(received[pair] - sent[pair])
        sender, receiver = pair
        if over and due:
            yield Desync(
                receiver, f"rank {sender} sent {over[0]} to rank {receiver}, which receives {due[0]}", is_missing=False
            )
        elif over:
            yield Desync(receiver, f"rank {receiver} never received {over[0]} that rank {sender} sent", is_missing=True)
        elif due:
            yield Desync(sender, f"rank {sender} never sent {due[0]} that rank {receiver} receives", is_missing=True)


def _messages(places: Mapping[int, RankPosition]) -> tuple[_Messages, _Messages]:
    """What ranks sent, and what they received."""
    sent: _Messages = defaultdict(Counter)
    received: _Messages = defaultdict(Counter)
    for rank, where in places.items():
        for launch in where.launches:
            match = _MESSAGE.fullmatch(launch.kind)
            if match is None:
                continue
            what, peer = f"{launch.numel:,} {launch.dtype}", int(match[2])
            if match[1] == "send to":
                sent[rank, peer][what] += 1
            else:
                received[peer, rank][what] += 1
    return sent, received
