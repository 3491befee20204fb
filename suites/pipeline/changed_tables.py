"""Tables of schedules with one change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_fxbucket.pipeline.schedules import Action, Table

ALL = -1
Change = Callable[[list[Action]], list[Action]]


def changed(table: Table, rank: int, change: Change) -> Table:
    ranks = [list(own) for own in table.ranks]
    for number in [rank] if rank != ALL else range(table.pp):
        ranks[number] = change(ranks[number])
    return replace(table, ranks=tuple(map(tuple, ranks)))


def place(own: list[Action], token: str) -> int:
    return next(index for index, action in enumerate(own) if action.token == token)


def without(*tokens: str) -> Change:
    return lambda own: [action for action in own if action.token not in tokens]


def moved(token: str, *, behind: str) -> Change:
    def change(own: list[Action]) -> list[Action]:
        action = own.pop(place(own, token))
        own.insert(place(own, behind) + 1, action)
        return own

    return change


def swapped(one: str, other: str) -> Change:
    def change(own: list[Action]) -> list[Action]:
        i, j = place(own, one), place(own, other)
        own[i], own[j] = own[j], own[i]
        return own

    return change


def each_alone(own: list[Action]) -> list[Action]:
    return [replace(action, batch=None) for action in own]
