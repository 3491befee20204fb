"""The marker `fxbucket_ranks`: what it asks for, and what is wrong with it."""

from __future__ import annotations

import inspect
import math
import unittest
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_fxbucket.limits import LONGEST_S
from pytest_fxbucket.ranks.backend import CHOICES

NAME = "fxbucket_ranks"
SIGNATURE = 'fxbucket_ranks(world, backend="gloo", timeout_s=60, mesh=None)'
MARKER = f"{SIGNATURE}: run the test's body on every one of `world` ranks; mesh is a size for each dimension by name"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a marker asks for."""

    world: int
    backend: str = "gloo"
    timeout_s: float = 60.0
    mesh: Mapping[str, int] | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The mesh's sizes by name; without one all ranks are `dp_shard`."""
        return self.mesh or {"dp_shard": self.world}


def is_marked(item: pytest.Item) -> bool:
    """Say whether the body of `item` is to run on ranks."""
    return item.get_closest_marker(NAME) is not None


def check(item: pytest.Item) -> None:
    """Fail a marked test that cannot run on ranks, with one sentence, before anything of it ran."""
    problem = _problem(item) if is_marked(item) else ""
    if problem:
        pytest.fail(f"{item.nodeid}: {problem}", pytrace=False)


def wanted(item: pytest.Item) -> Wanted:
    """What the closest marker of a marked test asks for. Raises TypeError for arguments that it does not take."""
    marker = item.get_closest_marker(NAME)
    assert marker is not None
    return Wanted(*marker.args, **marker.kwargs)


def _problem(item: pytest.Item) -> str:
    if not isinstance(item, pytest.Function) or (item.cls is not None and issubclass(item.cls, unittest.TestCase)):
        return f"only test functions and methods of plain classes run on ranks; take @pytest.mark.{NAME} off, or write one"
    if inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        return f"an async test does not run on ranks; let a plain function call asyncio.run, or take @pytest.mark.{NAME} off"
    try:
        asked = wanted(item)
    except TypeError as error:
        return f"expected @pytest.mark.{SIGNATURE}, got {_given(item)}: {str(error).partition('() ')[2]}"
    return next(_wrong_values(asked), "")


def _wrong_values(asked: Wanted) -> Iterator[str]:
    if type(asked.world) is not int or asked.world < 1:
        yield f"{NAME}: world is {asked.world!r}; expected a number of ranks, 1 or more"
    if asked.backend not in CHOICES:
        yield f"{NAME}: {asked.backend!r} is no backend; expected one of {', '.join(CHOICES)}"
    if not isinstance(asked.timeout_s, (int, float)) or not 0 < asked.timeout_s <= LONGEST_S:
        yield f"{NAME}: timeout_s is {asked.timeout_s!r}; expected seconds, more than 0 and at most {LONGEST_S}"
    if asked.mesh is not None and not _fits(asked.mesh, asked.world):
        yield f"{NAME}: mesh is {asked.mesh!r}; expected a size for each dimension by name, {asked.world} ranks in all"


def _fits(mesh: Any, world: int) -> bool:
    return (
        isinstance(mesh, Mapping)
        and all(isinstance(name, str) and type(size) is int and size > 0 for name, size in mesh.items())
        and math.prod(mesh.values()) == world
    )


def _given(item: pytest.Item) -> str:
    marker = item.get_closest_marker(NAME)
    assert marker is not None
    parts = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
    return f"({', '.join(parts)})"
