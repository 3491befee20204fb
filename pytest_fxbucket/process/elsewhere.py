"""Where code is called again to see whether it goes by more than it is given: untested, started otherwise, as another rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import ModuleType

from pytest_fxbucket.errors import FxbucketError, PassError

_OF_RUNNERS = ("PYTEST_", "FXBUCKET_", "GITHUB_", "GITLAB_", "CI_")
"""How variables begin that tell code that it is being tested; so does ``CI`` itself."""
_OF_RANKS = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))


@contextmanager
def _untested() -> Iterator[None]:
    hidden = {key: os.environ.pop(key) for key in list(os.environ) if key == "CI" or key.startswith(_OF_RUNNERS)}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def _on_another_rank() -> Iterator[None]:
    names = [name for pair in _OF_RANKS for name in pair]
    before = {name: os.environ.get(name) for name in names}
    # One that there is: of two, where nobody says of how many.
    world = _number(before["WORLD_SIZE"]) or _number(before["LOCAL_WORLD_SIZE"]) or 2
    sizes = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": _number(before["LOCAL_WORLD_SIZE"]) or world}
    for rank, size in _OF_RANKS:
        os.environ |= {rank: str((_number(before[rank]) + 1) % sizes[size]), size: str(sizes[size])}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _number(value: str | None) -> int:
    return int(value) if value and value.isdecimal() else 0


@contextmanager
def _started_otherwise() -> Iterator[None]:
    before = sys.argv
    sys.argv = ["train.py"]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _without_pytest() -> Iterator[None]:
    hidden: dict[str, ModuleType] = {}
    for name in sys.modules.keys() & {"pytest", "_pytest"}:
        hidden[name] = sys.modules.pop(name)
    try:
        yield
    finally:
        sys.modules.update(hidden)


CIRCUMSTANCES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    f"where no variable of the environment is CI or begins with {', '.join(_OF_RUNNERS)}": _untested,
    "where RANK and LOCAL_RANK in the environment say another rank; dist.get_rank() says which one it is": _on_another_rank,
    "where sys.argv is another": _started_otherwise,
    "where pytest is not imported": _without_pytest,
}
"""Each by how it is said of what goes by it."""


@contextmanager
def elsewhere() -> Iterator[None]:
    """All of them at once."""
    with ExitStack() as stack:
        for circumstance in CIRCUMSTANCES.values():
            stack.enter_context(circumstance())
        yield


def hold(what: str, made: str, again: Callable[[], str]) -> None:
    """See that ``what`` makes the same again: ``again`` calls it once more on the same graph, and gives a digest like ``made``.

    Raises PassError for what goes by anything else, with what that is; whatever ``again`` raises for people elsewhere is said
    with where that was.
    """
    with suppress(FxbucketError), elsewhere():
        if again() == made:
            return
    say_what_it_goes_by(what, made, again)
    raise only_where_all(what)


def only_where_all(what: str) -> PassError:
    """The error for what no single circumstance changes."""
    return PassError(f"{what} makes another graph of the same one only where all of this is so: {'; '.join(CIRCUMSTANCES)}")


def say_what_it_goes_by(what: str, made: str, again: Callable[[], str]) -> None:
    """Raise PassError with the first single circumstance under which ``again`` does not give ``made``, if there is one."""
    another = f"{what} makes another graph of the same one"
    if {again(), again()} != {made}:
        raise PassError(f"{another} when it is called again: it goes by chance, by time, or by what it kept of the call before")
    for where, circumstance in CIRCUMSTANCES.items():
        with circumstance():
            try:
                one = again()
            except FxbucketError as error:
                raise PassError(f"{error}, {where}") from error
        if one != made:
            raise PassError(f"{another} {where}")
